"""The HTTP surface: `/v1` for tenants' applications, `/api/v1` for operators and tenant admins."""
