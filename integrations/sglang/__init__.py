"""memsaver under SGLang.

With memsaver installed, an unmodified SGLang (0.5.11 or newer) uses it as its memory saver in every
process of an engine that has `enable_memory_saver=True`; nothing has to be imported or configured,
and torch_memory_saver is not needed. `memsaver.integrations.sglang.plugin` says how, and
`memsaver.integrations.sglang.settings` how to turn it off.

Importing this imports neither SGLang nor torch. It is no replacement of the name `sglang`.
"""
