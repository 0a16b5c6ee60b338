"""Tests how programs read saved contents through torch_memory_saver's interface."""

import pytest


def test_get_cpu_backup_returns_saved_contents(run_dropin):
    pytest.importorskip("torch")
    run_dropin(
        """
        import torch
        from refusals import refused

        def made(tag, **options):
            with saver.region(tag, **options):
                return simulator.empty((4, 3)).copy_(torch.arange(12.0).reshape(4, 3))
        kept, plain = made("a", enable_cpu_backup=True), made("a")
        disk = made("c", enable_disk_backup=True)
        expected = torch.arange(12.0).reshape(4, 3)
        assert saver.get_cpu_backup(kept) is None  # on the GPU
        assert saver.get_cpu_backup(torch.ones(3)) is None
        raises(ValueError, saver.get_cpu_backup, "kept")
        saver.pause()
        copy, view = saver.get_cpu_backup(kept), saver.get_cpu_backup(kept, zero_copy=True)
        for found in (copy, view, saver.get_cpu_backup(kept[1:, :2])):
            assert type(found) is torch.Tensor and found.device.type == "cpu"
        assert torch.equal(copy, expected) and torch.equal(view, expected)
        assert torch.equal(saver.get_cpu_backup(kept[1:, :2]), expected[1:, :2])
        assert copy.data_ptr() != view.data_ptr()
        copy.zero_()
        view[0, 0] = 7
        error = refused(memsaver.InvalidStateError, saver.get_cpu_backup, plain)
        assert error.tag == "a" and "tag 'a'" in str(error) and error.args == (str(error),)
        raises(memsaver.InvalidStateError, saver.get_cpu_backup, disk)
        saver.resume()
        expected[0, 0] = 7
        assert torch.equal(kept, expected)
        assert saver.get_cpu_backup(kept) is None
        assert not plain.any()
    """,
        with_torch=True,
    )


@pytest.mark.parametrize("backend", ["pinned", "mmap"])
def test_a_retained_backup_is_readable_while_the_tensor_is_mapped(run_dropin, backend):
    """A retained backup keeps its address across pauses, until a resume without retention."""
    pytest.importorskip("torch")
    run_dropin(
        f"""
        import torch
        with saver.region("a", enable_cpu_backup=True, cpu_backup_backend={backend!r}):
            x = simulator.empty((4, 256)).copy_(torch.arange(1024.0).reshape(4, 256))
        with saver.region("other " + "t" * 200, enable_cpu_backup=True):
            other = simulator.empty(8).zero_()
        with saver.region("plain"):
            plain = simulator.empty(8).zero_()
        shown = lambda: saver.get_cpu_backup(x, zero_copy=True)
        saver.pause("a")
        pointer, retain = shown().data_ptr(), saver.__class__.retain_cpu_backup.fset
        for addend in (5.0, 6.0, 0.0):
            saved = shown().clone()
            retain(saver, True)
            saver.resume("a")
            retain(saver, addend != 6.0)  # concerns the resumes that follow
            for _ in range(2):
                assert shown().data_ptr() == pointer and torch.equal(shown(), saved)
                assert torch.equal(x, saved)
            assert saver.get_cpu_backup(x).data_ptr() != pointer
            assert torch.equal(saver.get_cpu_backup(x[1:, :3]), saved[1:, :3])
            assert saver.get_cpu_backup(other) is None and saver.get_cpu_backup(plain) is None
            x += addend
            expected = x.clone()
            assert torch.equal(shown(), saved)
            shown().zero_()  # which reaches nothing else
            saver.pause("a")
            assert shown().data_ptr() == pointer and torch.equal(shown(), expected)
        retain(saver, False)
        saver.resume("a")
        assert shown() is None and torch.equal(x, expected)
    """,
        with_torch=True,
    )


@pytest.mark.parametrize("how", ["freed", "freed while paused"])
def test_a_retained_backup_goes_with_its_tensor(run_dropin, how):
    pytest.importorskip("torch")
    run_dropin(
        f"""
        import torch
        saver.retain_cpu_backup = True
        def make():
            with saver.region("a", enable_cpu_backup=True):
                return simulator.empty(MIB).fill_(3)
        x = make()
        address = x.data_ptr()
        saver.pause("a")
        if {how!r} == "freed while paused":
            del x
        saver.resume("a")
        x = None
        y = make()
        assert y.data_ptr() == address and saver.get_cpu_backup(y) is None
        saver.pause("a"), saver.resume("a")
        assert bool((saver.get_cpu_backup(y) == 3).all())
    """,
        with_torch=True,
    )
