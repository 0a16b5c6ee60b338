"""LightRFT's strategies over memsaver: the engine's sleep in stages, and the optimizer's.

    from memsaver.integrations.lightrft import adapt

    strategy = get_strategy(args)  # LightRFT's
    adapt(strategy)  # on every rank, before strategy.setup_inference_engine(...)

The methods of the strategy that are about memory are memsaver's from then on, with LightRFT's
names, arguments and order, so that its trainers need no change:

| method | what it does now |
|---|---|
| `maybe_sleep_inference_engine` | waits for requests in flight, gives KV cache and graphs back |
| `wakeup_inference_engine` | has them again; without room, an error that can be repeated |
| `update_engine_weights` | wakes the weights alone: the rest comes with the next generation |
| `maybe_offload_optimizer` | gives the optimizer's memory back, its addresses kept |
| `maybe_load_optimizer` | has it again |
| `save_ckpt`, `load_ckpt` | as LightRFT's, with the optimizer's memory there |

A failure on one rank is an error on all of them. Importing this imports neither torch nor LightRFT.
"""

from memsaver.integrations.lightrft.adapter import Adapted, adapt

__all__ = ["Adapted", "adapt"]
