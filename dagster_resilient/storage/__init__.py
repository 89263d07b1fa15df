"""Bytes in object storage: the narrow store interface, keys, manifests, retries. Knows nothing of tasks or Dagster."""
