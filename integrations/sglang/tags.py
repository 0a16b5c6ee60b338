"""Which tags of memsaver stand behind a tag of SGLang's.

SGLang says for each region whether its contents are kept, and may say both of one tag: with a draft
model whose weights are kept and a main model whose weights are not, say. memsaver keeps a policy
for each tag. So the first policy of a tag gets the tag's own name, and another one a tag beside it,
`weights:host` or `weights:none`, that is always paused and resumed together with it.
"""

from __future__ import annotations

import threading

import memsaver
from memsaver.errors import UnknownTagError
from memsaver.native import Backup, check_tag

__all__ = ["name_of", "names_of"]


def name_of(tag: str, backup: Backup) -> str:
    """The tag of memsaver's for a region of SGLang's. Any thread.

    Raises:
        ConfigError: SGLang's tag cannot be one.
    """
    check_tag(tag)
    with _lock:
        names = _names.setdefault(tag, {})
        return names.setdefault(backup, f"{tag}:{backup}" if names else tag)


def names_of(tag: str) -> tuple[str, ...]:
    """The tags of memsaver's to pause and resume, in one call, for one of SGLang's. Any thread.

    Empty where no region ever named it: SGLang releases tags that it never used, `cuda_graph` when
    graphs are not pausable, say. A tag that the process made with memsaver itself counts as well.
    """
    check_tag(tag)
    with _lock:
        names = list(_names.get(tag, {}).values())
    return tuple(name for name in dict.fromkeys([tag, *names]) if _is_known(name))


def _is_known(name: str) -> bool:
    try:
        memsaver.state(name)
    except UnknownTagError:
        return False
    return True


_names: dict[str, dict[Backup, str]] = {}
_lock = threading.Lock()
