"""SGLang on memsaver."""
