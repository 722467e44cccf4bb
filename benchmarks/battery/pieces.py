"""All pieces of the battery, in the order in which they run."""

from benchmarks.battery.piece import Piece

_TRAINER, _RANKS = "benchmarks.battery.trainer_pieces", "benchmarks.battery.rank_pieces"
_ENGINE, _VLLM = "benchmarks.battery.engine_pieces", "benchmarks.battery.vllm_pieces"

PIECES = (
    Piece(
        "speeds", "Products, memory and links are as fast as measured here.", f"{_TRAINER}:speeds"
    ),
    Piece(
        "attention",
        "A model in bfloat16 on the GPU, with the flash kernel, has the logprobs and gradients of"
        " the same model in float32 on the CPU.",
        f"{_TRAINER}:attention",
    ),
    Piece(
        "trainer-step",
        "A trainer of the largest random model that the planner lets onto one device makes its"
        " steps in bfloat16, and takes no more memory than planned.",
        f"{_TRAINER}:trainer_step",
    ),
    Piece(
        "int8-moments",
        "Moments in int8 take less memory, and change the weights as those in float32 do.",
        f"{_TRAINER}:int8_moments",
    ),
    Piece(
        "offload",
        "Moments and inputs of layers in the host's memory free the device's; losses are the same.",
        f"{_RANKS}:offload",
    ),
    Piece(
        "compile",
        "torch.compile leaves the logprobs and gradients of each layer as they are.",
        f"{_TRAINER}:compiled",
    ),
    Piece(
        "profile",
        "torch.profiler records a step; the trace is kept beside the report.",
        f"{_TRAINER}:profiled",
    ),
    Piece(
        "local-engine",
        "The logprobs with which engine=local sampled are the trainer's.",
        f"{_ENGINE}:local_engine",
    ),
    Piece(
        "weights",
        "engine=local serves the trainer's new weights after an update by each transport.",
        f"{_ENGINE}:weights",
        needs=("xxhash",),
    ),
    Piece(
        "fsdp",
        "Two ranks of FSDP have the losses of one device.",
        f"{_RANKS}:fsdp",
        gpus=2,
    ),
    Piece(
        "fsdp-step",
        "FSDP over all GPUs trains the largest random model that the planner lets onto them.",
        f"{_RANKS}:fsdp_step",
        gpus=2,
        on_cpu=False,
    ),
    Piece(
        "vllm-logprobs",
        "The logprobs with which vLLM sampled are the trainer's.",
        f"{_VLLM}:logprobs",
        needs=("vllm", "xxhash"),
    ),
    Piece(
        "vllm-sleep",
        "vLLM sleeps while the trainer steps on the same GPU, wakes, and answers as before.",
        f"{_VLLM}:sleep",
        on_cpu=False,
        needs=("vllm", "xxhash"),
    ),
    Piece(
        "vllm-weights",
        "vLLM serves the trainer's new weights after an update by each transport.",
        f"{_VLLM}:weights",
        needs=("vllm", "xxhash"),
    ),
    Piece(
        "vllm-restart",
        "A killed vLLM is replaced, and no request is lost.",
        f"{_VLLM}:restart",
        needs=("vllm", "xxhash"),
    ),
)
