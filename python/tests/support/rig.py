"""The device and the backend of the tests, from one place: DEVICE.

cpu      gloo, what `make test` runs on
cuda     gloo, through the host: all ranks may share one GPU
guarded  a CPU that behaves like a device, see guarded/__init__.py
"""

import os

DEVICE = os.environ.get("DEVICE") or "cpu"
BACKENDS = {
    "cpu": "gloo",
    "cuda": "gloo",
    "guarded": "cpu:gloo,guarded:guarded",
}
BACKEND = BACKENDS.get(DEVICE)


# What torch.library.opcheck looks at; PyTorch can tell how an operator's autograd is
# registered for devices of its own only.
OPCHECKS = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
if DEVICE != "guarded":
    OPCHECKS.append("test_autograd_registration")


def missing():
    """Why nothing can run on DEVICE here, in one line; None where it can."""
    if DEVICE not in BACKENDS:
        return f"DEVICE={DEVICE}: expected {', '.join(BACKENDS)}; nothing was run"
    if DEVICE != "cuda":
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return "DEVICE=cuda: this PyTorch sees no GPU; nothing was run"


def prepare():
    """Before PyTorch is asked for the device; starts no thread."""
    if DEVICE == "guarded":
        import guarded  # noqa: F401
    if DEVICE == "cuda":  # CUDA's runtime, once asked, does not survive a fork
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        # NCCL, which programs would take, wants a GPU for each rank. On the CPU then.
        os.environ["SHARDTENSOR_DISTRIBUTED_BACKEND"] = BACKEND


# PyTorch's own tests, which ask for the GPU's capability while they are imported.
ASK_THE_GPU = ("conformance", "operator_samples", "torch.testing")


def may_preload(name):
    """Whether the process from which workers are forked may import it."""
    return DEVICE != "cuda" or not name.startswith(ASK_THE_GPU)


def is_lost(text):
    """Whether an error leaves a process that can no longer use the device."""
    return DEVICE == "cuda" and ("CUDA error" in text or "device-side assert" in text)


def device_of(rank):
    """Where a rank's tensors are."""
    import torch

    if DEVICE != "cuda":
        return torch.device(DEVICE)
    return torch.device(DEVICE, rank % torch.cuda.device_count())


def enter(rank):
    """In a worker: its device is the current one, and what it computes there is
    what the oracle computes."""
    import torch

    if DEVICE == "cuda":
        torch.cuda.set_device(device_of(rank))
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        gather_through_the_host("CUDA")
    else:  # each would note where it was called, for the day somebody asks for a GPU
        for module in (torch.cuda, torch.xpu, torch.mtia):
            module.manual_seed_all = lambda seed: None


_kernels = []  # they go with their Library


def gather_through_the_host(key):
    """DTensor's gather: gloo takes a GPU's memory for the host's there, and dies."""
    import torch

    functional = torch.ops._c10d_functional

    def all_gather(x, ranks, group):
        gathered = functional.all_gather_into_tensor(x.cpu(), ranks, group)
        return functional.wait_tensor(gathered).to(x.device)

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", all_gather, key)
    _kernels.append(library)


def generator(seed):
    """For tensors on the default device, which is the host's in pytest's process."""
    import torch

    device = torch.empty(0).device
    return torch.Generator(device if device.type == "cuda" else "cpu").manual_seed(seed)


def default_generator():
    """That of a rank's device."""
    import torch

    if DEVICE == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def autocast(dtype):
    """On a rank's device."""
    import torch

    return torch.autocast(DEVICE, dtype)


def finish():
    """What a body has put into the device's queues is done, or raises."""
    import torch

    if DEVICE != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":  # for make
    print(missing() or "", end="")
