"""The control plane: tenants, keys, adapters, usage and the HTTP surface. It never loads torch."""
