"""On the path of an engine's processes: lets a test change what the model holds after a load.

While the file that MEMSAVER_TEST_CORRUPTS names exists, each load is followed by a change of one
element of the parameter that is named in it.
"""

import os
from pathlib import Path

FLAG = os.environ.get("MEMSAVER_TEST_CORRUPTS")

if FLAG:
    from memsaver.integrations.sglang import weight_loads

    watched = weight_loads.watched

    def and_corrupted(model, named, load):
        result = watched(model, named, load)
        if Path(FLAG).exists():
            name = Path(FLAG).read_text()
            tensor = dict(model.named_parameters())[name].data
            tensor[-1, -1] += 1
        return result

    weight_loads.watched = and_corrupted
