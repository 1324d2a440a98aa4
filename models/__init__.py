"""Model families in JAX. This package imports nothing of `envace_jax`."""
