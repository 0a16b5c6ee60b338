"""The engine-independent parts of memsaver's integration with inference engines.

The package defines an engine's tags, status, reports and errors. It implements the engine's sleep,
counts the requests in flight, and verifies new weights. An integration implements
`interface.Engine` for sleep and `interface.Backend` for rollouts. See
`memsaver.integrations.sglang` and `memsaver.integrations.vllm`.

| module | content |
|---|---|
| `interface` | the calls that an engine implements, with their arguments and results |
| `sleep` | `EngineController`: sleep, wake-up and generation in the right order |
| `tags`, `status`, `reports`, `errors` | the tags, status, reports and errors of these calls |
| `knowledge`, `requests` | the controller's state: released tags, requests in flight |
| `messages`, `fields` | messages of an engine's processes, as JSON |
| `imports`, `variables` | an engine's plugin: callbacks after imports, environment variables |
| `ranks`, `moves` | inside an engine's processes: attempts on all ranks; pauses and resumes |
| `placement`, `processes`, `loops` | the GPUs, processes and event loops of engines started here |
| `local_calls`, `locks` | calls to engines in this process, and their waits for other threads |
| `weights` | inside an engine's processes: verification of weights that a trainer sends |
| `admission`, `admitted`, `policies`, `refusals`, `idle` | requests to a sleeping engine |
| `http` | a client for engines behind a URL; the responses of a sleeping server |

No module in this package imports an engine or any other package of `memsaver.integrations`.
"""
