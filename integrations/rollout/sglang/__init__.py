"""SGLang as the engine of a rollout."""
