"""The base model: where it comes from, its geometry, its weights and its forward pass."""
