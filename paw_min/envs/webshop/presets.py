"""WebShop: the presets, the default first. See benchmarks.py: presets_of."""

# Qwen2.5-1.5B/7B
PAPER = dict(
    model="Qwen/Qwen2.5-1.5B-Instruct", eval_split="test", updates=150, eval_every=5, save_every=5,
    max_turns=15, max_prompt_tokens=4096, mini_batch=64, n_products=1000, grad_checkpointing=True,
    sampler="vllm",
)

TINY = dict(
    eval_split="test", prompt="compact", history_length=3, max_prompt_tokens=600,
    max_response_tokens=24, max_obs_tokens=1024, max_turns=8, groups=8, group_size=8, updates=8,
    eval_every=4, eval_tasks=60, lr=1e-4, mini_batch=256, micro_tokens=2048, entropy_coef=0.0,
    wm_separator="none",
)

PRESETS = {
    # 0.9 million parameters and a small invented shop: trains on a laptop CPU in minutes.
    "tiny": TINY,
    "paper": PAPER,
    # These fit one GPU of 24 or 80 GB: the preset paper with LoRA and its learning rate.
    "24gb": PAPER | dict(lora_rank=16, lr=1e-5, vllm_memory=0.6),
    "80gb": PAPER | dict(
        model="Qwen/Qwen2.5-7B-Instruct", lora_rank=16, lr=1e-5, vllm_memory=0.5,
    ),
}
