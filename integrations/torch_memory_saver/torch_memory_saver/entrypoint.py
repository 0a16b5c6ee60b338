"""`TorchMemorySaver`, implemented with memsaver: regions, graphs, pauses and resumes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import memsaver
from memsaver._runtime.native import _C, Backup
from memsaver._transitions import parts
from memsaver.errors import ConfigError, InvalidStateError, NotLoadedError
from torch_memory_saver.backups import Backups, CpuBackupBackend, backup_for
from torch_memory_saver.binary_wrapper import BinaryWrapper, ThreadState
from torch_memory_saver.environment import Environment, read_environment
from torch_memory_saver.errors import program_tags
from torch_memory_saver.hooks.base import HookMode

__all__ = ["TorchMemorySaver"]


class TorchMemorySaver:
    """A saver that pauses and resumes tensors by tag; all savers of a process share the tags.

    The methods raise memsaver's errors. After an error, no contents are lost, and no operation is
    partially complete. Pausing a paused tag, resuming a mapped tag, and pausing or resuming an
    unknown tag have no effect. Any thread may call the methods; a region applies to the thread that
    entered it.
    """

    def __init__(self) -> None:
        self._hook_mode: HookMode = "preload"
        self._impl: _Process | None = None

    @contextlib.contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Assign tensors created during the block to `tag`.

        Regions with the same tag can have different backups; each tensor has the backup of its
        region.

        Args:
            tag: the name for `pause` and `resume`.
            enable_cpu_backup: whether a resume restores contents from host memory. Without a
                backup, the memory is zero after a resume.
            enable_disk_backup: whether a resume restores contents from a file in the directory that
                `set_disk_backup_dir` or TMS_DISK_BACKUP_DIR specifies.
            cpu_backup_backend: "pinned" for pinned host memory, which is the fastest, or "mmap" for
                pageable memory. None means the value of TMS_INIT_CPU_BACKUP_BACKEND, or "pinned" if
                this variable is not set.

        Raises:
            ConfigError: the options are inconsistent, or the tag is empty.
            InvalidStateError: the tag is paused.
            NotLoadedError: there is no GPU, or torch is missing or cannot use the GPU.
        """
        impl = self._ensure_initialized()
        backup = impl.backup_for(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        name = parts.name_of(tag, backup)
        devices = impl.devices() if self._hook_mode == "preload" else None
        region = memsaver.region(name, backup=backup, device=devices)
        with program_tags(), region, impl.thread.scope():
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Capture a graph as `torch.cuda.graph` does, with its memory in `tag`.

        Works in both hook modes.

        Args:
            cuda_graph: a `torch.cuda.CUDAGraph` to capture into.
            pool: the memory pool; graphs that this method captures with the same pool share memory.
            stream: the stream to capture on.
            capture_error_mode: see `torch.cuda.graph`.
            tag: see `region`.
            enable_cpu_backup: see `region`.
            cpu_backup_backend: see `region`.

        Raises:
            ConfigError, InvalidStateError, NotLoadedError: see `region`.
        """
        impl = self._ensure_initialized()
        backup = impl.backup_for(enable_cpu_backup, False, cpu_backup_backend)
        name = parts.name_of(tag, backup)
        capture = memsaver.graph(
            cuda_graph,
            name,
            backup=backup,
            pool=pool,
            stream=stream,
            capture_error_mode=capture_error_mode,
        )
        with program_tags(), capture, impl.thread.scope():
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Exclude tensors created during the block from all tags.

        Outside all regions, the block has no effect.
        """
        impl = self._ensure_initialized()
        with memsaver.disabled(), impl.thread.scope():
            yield

    @program_tags()
    def pause(self, tag: str | None = None) -> None:
        """Release the device memory of a tag, or of all tags, and keep the addresses.

        Raises:
            MemsaverError: see `memsaver.pause`. Every tag is still mapped with its contents.
        """
        self._ensure_initialized()
        if not tag:
            memsaver.pause()
        elif names := parts.names_of(tag):
            memsaver.pause(*names)

    @program_tags()
    def resume(self, tag: str | None = None) -> None:
        """Map memory at the addresses of a tag, or of all tags, and restore the saved contents.

        After the restore, the host memory of "mmap" backups is released. If `retain_cpu_backup` was
        set to False, the host memory of all backups is released. Starts no thread.

        Raises:
            MemsaverError: see `memsaver.resume`; for example `OutOfDeviceMemoryError`. Every tag
                stays paused with its backup, and the call can be repeated.
        """
        impl = self._ensure_initialized()
        if not tag:
            memsaver.resume()
            impl.backups.resumed([row.tag for row in memsaver.stats().tags])
        elif names := parts.names_of(tag):
            memsaver.resume(*names)
            impl.backups.resumed(names)

    @property
    def enabled(self) -> bool:
        """Return True, because this saver is always enabled."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """The requested mode, "preload" by default. Both modes work in every process.

        With "preload", a region applies to all GPUs that the process uses. With "torch", a region
        applies to the current GPU. The mode cannot be set after the first use.

        Raises:
            ConfigError: the new mode is unknown.
            InvalidStateError: the mode is set after the first use of the object.
        """
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in ("preload", "torch"):
            raise ConfigError(f"hook_mode {hook_mode!r} is not one of preload, torch")
        if self._impl is not None:
            raise InvalidStateError(
                "hook_mode can no longer be set: set it before the first region, pause or resume"
            )
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """The bytes of device memory that allocations in regions must leave free; the default is 0.

        An allocation that would leave less free memory fails with an out-of-memory error. Torch
        then releases its cached blocks and retries the allocation.

        Raises:
            ConfigError: the new value is not a valid size.
        """
        self._ensure_initialized()
        return int(_C.option("margin_bytes"))

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._ensure_initialized().thread.set_memory_margin_bytes(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether backups for `get_cpu_backup` stay in host memory after a resume.

        A value set here or by TMS_RETAIN_CPU_BACKUP applies to later resumes. True keeps the host
        memory of backups with its contents. False releases the host memory in each `resume`. If no
        value has been set, this property is False, and a resume releases "mmap" memory but keeps
        pinned memory without its contents to make the next pause fast.
        """
        return self._ensure_initialized().backups.retain or False

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ensure_initialized().backups.retain = bool(value)

    @program_tags()
    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """Return the last pause's copy of a tensor as a CPU tensor; None if there is no copy.

        A copy exists if the tensor's tag is paused, or if the tag was resumed while
        `retain_cpu_backup` was True. In the second case, the copy contains the contents of the last
        pause, and its host address is the same for every pause.

        Args:
            x: a tensor.
            zero_copy: False returns a copy of the backup. True returns a tensor that shares the
                backup's memory and is valid until the tag's next transition. If the tag is paused,
                a resume copies the contents of the returned tensor, including any changes to them,
                back to device memory.

        Raises:
            ConfigError: `x` is not a tensor.
            InvalidStateError: the tensor's tag is paused, and has no backup or a backup on disk.
        """
        impl = self._ensure_initialized()
        import torch

        if not isinstance(x, torch.Tensor):
            raise ConfigError(f"get_cpu_backup takes a torch tensor, not {type(x).__name__}")
        view = impl.backups.view(x, writable=zero_copy)
        return view if view is None or zero_copy else view.clone()

    def set_disk_backup_dir(self, path: str) -> None:
        """Set the directory for backups on disk, and create it if needed.

        Backups of paused tags stay in the earlier directory.

        Raises:
            ConfigError: the directory cannot be created or written to.
        """
        self._ensure_initialized()
        _set_disk_dir(path)

    def _ensure_initialized(self) -> _Process:
        if self._impl is None:
            self._impl = _process(self._hook_mode)
        return self._impl


class _Process:
    """The state that all `TorchMemorySaver` objects of a process share."""

    def __init__(self, environment: Environment) -> None:
        self.thread = ThreadState(environment.backend)
        self.backups = Backups(environment.retain)
        self._binary_wrapper = BinaryWrapper(self.thread)
        self._backend = environment.backend

    def backup_for(self, cpu: bool, disk: bool, backend: str | None) -> Backup:
        """Return memsaver's backup policy for a region's options."""
        return backup_for(cpu, disk, backend, self._backend)

    def devices(self) -> list[int] | None:
        """Return the GPUs that torch uses in this process if there are several; otherwise None."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or torch.cuda.device_count() < 2:
            return None
        used = {torch.cuda.current_device()}
        used.update(filter(torch._C._cuda_hasPrimaryContext, range(torch.cuda.device_count())))
        return sorted(used)


def _process(hook_mode: HookMode) -> _Process:
    environment = read_environment()
    if environment.whole_process and hook_mode == "preload" and not memsaver.is_preloaded():
        raise NotLoadedError(
            "TMS_INIT_ENABLE makes the whole process a region, which requires a preloaded "
            "memsaver: start the process in configure_subprocess(), or set LD_PRELOAD to the "
            "library that torch_memory_saver.utils.get_binary_path_from_package returns"
        )
    if not _shared:
        if environment.disk_dir is not None:
            _set_disk_dir(environment.disk_dir)
        _shared.append(_Process(environment))
    return _shared[0]


def _set_disk_dir(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the directory {path!r} for backups: {error}") from error
    memsaver.configure(disk_dir=path)


# The first element is the process's state. No lock, because a finalizer may call `_process` while
# its own thread is already in the function.
_shared: list[_Process] = []
