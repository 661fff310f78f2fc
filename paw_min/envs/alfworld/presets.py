"""ALFWorld: the presets, the default first. See benchmarks.py: presets_of."""

# 0.9 million parameters and small stored games: trains on a laptop CPU in minutes.
TINY = dict(
    prompt="compact", history_length=1, max_prompt_tokens=400, max_response_tokens=16,
    max_obs_tokens=64, max_turns=16, groups=8, group_size=8, updates=8, eval_every=4, eval_tasks=60,
    lr=2e-4, mini_batch=256, micro_tokens=2048, entropy_coef=0.0,
    # The stand-ins have read observations as documents, which begin after an end token.
    wm_separator="none",
    # KL term and format penalty keep their defaults, as in the preset `paper`. Without them, only
    # the world-model loss has a gradient where no episode is won: responses become malformed.
)

# Qwen2.5-1.5B/7B
PAPER = dict(
    model="Qwen/Qwen2.5-1.5B-Instruct", updates=150, eval_every=5, save_every=5,
    grad_checkpointing=True, sampler="vllm", workers=4,
)

PRESETS = {
    "tiny": TINY,
    "paper": PAPER,
    # These fit one GPU of 24 or 80 GB: the preset paper with LoRA and its learning rate.
    "24gb": PAPER | dict(lora_rank=16, lr=1e-5, vllm_memory=0.6),
    "80gb": PAPER | dict(
        model="Qwen/Qwen2.5-7B-Instruct", lora_rank=16, lr=1e-5, vllm_memory=0.5,
    ),
}
