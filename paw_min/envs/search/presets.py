"""Search: the presets, the default first. See benchmarks.py: presets_of."""

# Qwen2.5-3B/7B. The learning rate has no warm-up; verl-agent has one.
PAPER = dict(
    model="Qwen/Qwen2.5-3B-Instruct", eval_split="test", updates=200, eval_every=50, eval_tasks=0,
    save_every=10, max_turns=4, history_length=4, max_prompt_tokens=4096,
    groups=256, group_size=5, mini_batch=512, invalid_penalty=0.01,
    eval_temperature=0.0, kl_coef=0.001, entropy_coef=0.0, grad_checkpointing=True, sampler="vllm",
    vllm_memory=0.3,  # 3B fits one GPU of 80 GB
)

TINY = dict(
    eval_split="test", prompt="compact", history_length=4, max_prompt_tokens=600,
    max_response_tokens=16, max_obs_tokens=128, max_turns=4, topk=1, groups=16, group_size=8,
    updates=16, eval_every=4, eval_tasks=100, lr=5e-4, mini_batch=128, micro_tokens=2048,
    kl_coef=0.001, entropy_coef=0.0, invalid_penalty=0.01,
    wm_separator="none",
)

PRESETS = {
    # 0.9 million parameters and a small invented world: trains on a laptop CPU in minutes.
    "tiny": TINY,
    "paper": PAPER,
    # These fit one GPU of 24 or 80 GB: the preset paper with LoRA and its learning rate.
    "24gb": PAPER | dict(
        model="Qwen/Qwen2.5-1.5B-Instruct", lora_rank=16, lr=1e-5, vllm_memory=0.6,
    ),
    "80gb": PAPER | dict(
        model="Qwen/Qwen2.5-7B-Instruct", lora_rank=16, lr=1e-5, vllm_memory=0.5,
    ),
}
