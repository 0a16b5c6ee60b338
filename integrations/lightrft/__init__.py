"""Memory management for LightRFT: the engine sleeps in stages, and the optimizer is paused.

    from memsaver.integrations.lightrft import adapt

    strategy = get_strategy(args)  # LightRFT's
    adapt(strategy)  # on every rank, before strategy.setup_inference_engine(...)

After this call, memsaver implements the strategy's memory methods. They keep LightRFT's names,
arguments and order, so LightRFT's trainers need no change:

| method | effect |
|---|---|
| `maybe_sleep_inference_engine` | waits for requests in flight, releases KV cache and graphs |
| `wakeup_inference_engine` | maps this memory again; after an error the call may be repeated |
| `update_engine_weights` | wakes only the weights; the next generation wakes the rest |
| `maybe_offload_optimizer` | releases the optimizer's memory, and keeps its addresses |
| `maybe_load_optimizer` | maps the optimizer's memory again |
| `save_ckpt`, `load_ckpt` | call LightRFT's methods with the optimizer's memory mapped |

A failure on one rank raises an error on all ranks. Importing this package imports neither torch nor
LightRFT.
"""

from .adapter import Adapted, adapt

__all__ = ["Adapted", "adapt"]
