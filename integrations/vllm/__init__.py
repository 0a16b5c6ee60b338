"""memsaver as vLLM's sleep mode allocator.

With memsaver installed, an unmodified vLLM with `enable_sleep_mode=True` allocates its weights and
its KV cache through memsaver, and sleeps and wakes up through it, in every worker; nothing has to
be imported or configured. `memsaver.integrations.vllm.plugin` describes the mechanism, and
`memsaver.integrations.vllm.settings` the variables that configure it.

Importing this package imports neither vLLM nor torch. It does not replace the name `vllm`.
"""
