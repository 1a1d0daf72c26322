"""A device for tests whose memory the host cannot touch.

`import guarded` makes `torch.device("guarded")` known, and a backend of
torch.distributed for its tensors. Its kernels are the CPU's, so that what is
computed is what the CPU computes; a read of device memory by the host ends the
process, a host tensor beside device tensors is an error as on CUDA. A kernel
waits in its stream's queue until the host waits for it (queue.h): a stream or a
host that does not wait reads poison, and so does a kernel whose memory was freed
while it was queued, unless record_stream said that it is. Copies to and from the
host are counted:

    before = guarded.count()
    step()
    assert guarded.copies_since(before) == {"to_host": 0, "to_device": 0}

`make build-tests` compiles it.
"""

import contextlib

import torch
import torch.distributed as dist

from guarded import _guarded
from guarded._guarded import count, reset_peak_bytes  # noqa: F401

NAME = "guarded"


def copies_since(before):
    now = count()
    return {name: now[name] - before[name] for name in ("to_host", "to_device")}


def _stream(_device=None, priority=0):
    return torch.Stream(device=NAME, priority=priority)


class _Runtime:
    """What PyTorch asks torch.<device> for."""

    Stream = staticmethod(_stream)
    Event = staticmethod(lambda *_, **__: torch.Event(NAME))
    current_stream = staticmethod(torch.accelerator.current_stream)
    stream = staticmethod(lambda stream: stream)  # a context by itself
    device = staticmethod(lambda _device: contextlib.nullcontext())

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def set_device(_index):
        pass

    @staticmethod
    def synchronize(_device=None):
        torch.accelerator.synchronize()

    @staticmethod
    def manual_seed_all(_seed):
        pass  # its generator is the CPU's

    @staticmethod
    def get_rng_state(_device=None):
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state, _device=None):
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.float16, torch.bfloat16]


def _backend_maker(as_gloo):
    def make(store, rank, size, timeout):
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        return _guarded.make_backend(gloo, as_gloo)

    return make


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _Runtime)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend(NAME, _backend_maker(as_gloo=False), devices=[NAME])
dist.Backend.register_backend(
    "staged_gloo", _backend_maker(as_gloo=True), devices=[NAME]
)

from guarded import attention  # noqa: E402, F401  its kernels
