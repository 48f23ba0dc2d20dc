"""Which logical tensors a model has, read from its Hugging Face config."""
