"""Models of many families and makers, as small files: which work, and which are refused.

MODELS.md has the result as a table; tests/model_kinds.py says what a published kind is.
"""

import json
import math
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from paw_min import train
from paw_min.config import Config
from paw_min.model.batches import collate
from paw_min.model.loading import load_policy, load_tokenizer
from paw_min.model.published import load_config, rules
from paw_min.model.sampler import HFSampler, Request
from paw_min.model.shard import layers_of
from paw_min.model.vllm_sampler import VLLMSampler, check_model
from paw_min.rows import TokenRow
from paw_min.running import export, memory, plan, session
from tests.helpers import (
    BASE,
    CHATML,
    EPISODES,
    HOSTILE_TEXT,
    TEXTS,
    TOKEN_ROWS,
    change,
    one_sentence,
    update,
)
from tests.model_kinds import (
    KINDS,
    NEMO,
    NEMO_CHAT,
    NEMO_TURN,
    PIECES,
    PUBLISHED,
    THOUGHTS,
    TOKENIZER,
    WORDS_OF_BYTES,
    Kind,
    write,
    write_published,
)


def check_tokens(policy, made: Tokenizer, kind: Kind) -> None:
    """Its ids are those of tokenizer.json, o' follows one end token, and has no control token.

    Whether tokenizer.json calls what the template writes "special" or not.
    """
    chat = policy.render([{"role": "user", "content": "go to desk 1\n\n a's 12345  日本"}])
    for text in (chat, *TEXTS, HOSTILE_TEXT):
        ids = policy.encode_rendered(text)
        assert ids == made.encode(text, add_special_tokens=False).ids
        assert policy.tokenizer.decode(ids) == made.decode(ids, skip_special_tokens=False)
    assert "go to shelf 1" in policy.decode(policy.encode("go to shelf 1"))
    end = made.token_to_id(kind.end)
    assert policy.eos_ids[0] == end
    between = made.encode(kind.between, add_special_tokens=False).ids
    response = [*policy.encode("look"), end]
    assert policy.separator(response[:-1]) == between
    assert policy.separator(response) == between[between.index(end) + 1 :]
    words = {*kind.tokens.special, *kind.tokens.plain} - {*THOUGHTS, "<tool_call>"}
    control = {made.token_to_id(word) for word in words}
    text = f"a {' '.join(words)}{''.join(words)} b"
    assert not control & set(policy.encode(text))
    forged, honest = policy.encode_chat(text), policy.encode_chat("a b")
    assert [t for t in forged if t in control] == [t for t in honest if t in control]
    assert policy.decode(response) == policy.decode(response[:-1])


@torch.no_grad()
def gap(policy, sampler) -> float:
    """Most |log pi - log mu| of a sampled token, in nats; prompts of two lengths."""
    requests = [Request(k, row.prompt_ids, seed=k) for k, row in enumerate(TOKEN_ROWS)]
    with sampler.sync(policy):
        parts = list(sampler.generate(deque(requests), 1.0, 6))
    responses = sorted((r for part in parts for r in part), key=lambda r: r.slot)
    rows = [TokenRow(q.prompt_ids, r.ids, []) for q, r in zip(requests, responses, strict=True)]
    logp, _ = policy(collate(rows, [False] * len(rows), policy.pad_id))
    theirs = torch.zeros_like(logp)
    for row, r in zip(theirs, responses):
        row[: len(r.logps)] = torch.tensor(r.logps)
    return (logp - theirs).abs().max().item()


@pytest.mark.parametrize("kind", PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_model_is_planned_loaded_sampled_trained_saved_and_exported(
    kind, tmp_path, config
):
    folder = write_published(kind, tmp_path / "published")
    plan.dry_run(config(model=folder, max_prompt_tokens=200))
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    policy = load_policy(folder)
    check_tokens(policy, made, kind)
    assert gap(policy, HFSampler()) < 1e-3
    layers = layers_of(policy.model.get_decoder())
    assert len(layers) == policy.model.config.num_hidden_layers
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    batch = collate(TOKEN_ROWS, [True] * 3, policy.pad_id)
    before = policy(batch)[0].detach()
    metrics = update(Config(**BASE), policy, None, optimizer, EPISODES, (0, 0))
    after = policy(batch)[0].detach()
    assert math.isfinite(metrics["grad_norm"]) and (after - before).abs().mean() > 1e-3
    ids = torch.tensor([policy.encode_chat("go to shelf 1")])
    policy.save(tmp_path / "run" / "checkpoint-000001")
    export.main([str(tmp_path / "run"), "--out", str(tmp_path / "exported")])
    for saved in ("run/checkpoint-000001", "exported"):
        again = load_policy(str(tmp_path / saved))
        check_tokens(again, made, kind)
        stored = Tokenizer.from_file(str(tmp_path / saved / "tokenizer.json"))
        assert rules(stored) == rules(again.tokenizer.backend_tokenizer)
        assert rules(stored)["pre_tokenizer"] == rules(made)["pre_tokenizer"]
        with torch.no_grad():
            if saved == "exported":
                for weight in policy.model.parameters():
                    weight.copy_(weight.bfloat16())
            assert torch.equal(again.model(ids).logits, policy.model(ids).logits)


@pytest.mark.parametrize("name, closing", [
    ("GLM-4", "<|user|>"), ("Nemotron-Mini", "\n<extra_id_1>"), ("Qwen2.5", "<|im_end|>"),
])
def test_a_label_ends_as_the_template_ends_a_turn(name, closing, tmp_path):
    """Where it has no end token, with the token of the next role, which is not repeated."""
    folder = write_published(PUBLISHED[name], tmp_path)
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    policy = load_policy(folder)
    label = policy.encode_response("look")
    ids = made.encode(closing, add_special_tokens=False).ids
    assert label[-len(ids) :] == ids and policy.decode(label).strip() == "look"
    if name == "GLM-4":  # Its pieces do not depend on the text before.
        turns = [{"role": role, "content": text} for role, text in (
            ("user", "a"), ("assistant", "look"), ("user", "b"))]
        text = policy.tokenizer.apply_chat_template(turns, tokenize=False)
        written = policy.encode_rendered(text)
        behind = policy.separator(label)
        assert written == [*policy.encode_chat("a"), *label, *behind, *policy.encode("b")]
        other = made.token_to_id("<|endoftext|>")  # which the template never writes
        assert policy.separator([*label[:-1], other]) == [label[-1], *behind]
        assert other in policy.eos_ids


SETTINGS = {  # of tokenizer_config.json
    "split_special_tokens": {"split_special_tokens": True},
    "add_bos_token": {"add_bos_token": True, "add_eos_token": True},
    "add_prefix_space": {"add_prefix_space": True, "legacy": True},
    "cleanup": {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True},
    "sampling": {"sp_model_kwargs": {"enable_sampling": True, "alpha": 0.1, "nbest_size": -1}},
    "padding": {"padding_side": "left", "truncation_side": "left", "model_max_length": 4},
}


@pytest.mark.parametrize("kind, name", [
    ("Qwen2.5", "split_special_tokens"), ("Qwen2.5", "dropout"),
    *[("Llama-2", name) for name in (*SETTINGS, "dropout", "truncation")],
])
def test_settings_of_a_tokenizers_files_change_no_ids(name, kind, tmp_path):
    kind = PUBLISHED[kind]
    folder = write_published(kind, tmp_path)
    path = tmp_path / "tokenizer.json"
    made = Tokenizer.from_file(str(path))
    if name == "dropout":
        content = json.loads(path.read_text())
        content["model"]["dropout"] = 0.9
        path.write_text(json.dumps(content))
    elif name == "truncation":
        other = Tokenizer.from_file(str(path))
        other.enable_truncation(2)
        other.enable_padding(length=64)
        other.save(str(path))
    else:
        change(tmp_path / "tokenizer_config.json", **SETTINGS[name])
    text = "a . b , c 's"
    ids = made.encode(text, add_special_tokens=False).ids
    expected = made.decode(ids, skip_special_tokens=False)
    for _ in range(2):
        policy = load_policy(folder)
        check_tokens(policy, made, kind)
        assert policy.decode(policy.encode(text)) == expected
        folder = str(tmp_path / "saved")
        policy.save(folder)


@pytest.mark.parametrize("change_it, reason", [
    # <|im_start|>user is no single word
    (lambda t: {**t, "single_word": True}, "reads '<.im_start.>', which its chat template writes"),
])
def test_a_tokenizer_that_reads_its_control_tokens_as_text_is_refused(change_it, reason, tmp_path):
    folder = write_published(PUBLISHED["Qwen2.5"], tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [change_it(token) for token in content["added_tokens"]]
    path.write_text(json.dumps(content))
    for load in (load_tokenizer, load_policy):
        with one_sentence(reason):
            load(folder)


def test_a_template_that_draws_is_refused(tmp_path):
    folder = write_published(PUBLISHED["Qwen2.5"], tmp_path)
    template = "{{ ['a', 'b', 'c', 'd', 'e'] | random }}" + CHATML
    change(tmp_path / "tokenizer_config.json", chat_template=template)
    with one_sentence("at random"):
        load_tokenizer(folder)


def test_tekken_json_beside_mistral_common(tmp_path, monkeypatch):
    """The class that transformers then takes has no backend_tokenizer."""
    kind = PUBLISHED["Mistral-Nemo"]
    folder = write_published(kind, tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    of_transformers = AutoTokenizer.from_pretrained

    def with_mistral_common(folder, mistral_format=None, **options):
        if mistral_format is False:
            return of_transformers(folder, mistral_format=False, **options)
        return SimpleNamespace(special_tokens_map={})

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", with_mistral_common)
    check_tokens(load_policy(folder), Tokenizer.from_file(f"{folder}/tokenizer.json"), kind)


@pytest.mark.parametrize("special, pad", [(True, None), (False, None), (True, "<unused63>")])
def test_only_control_tokens_that_nothing_writes_need_no_embedding(special, pad, tmp_path):
    """Gemma 3 has a token for pictures, and its models for text no embedding for it."""
    folder = write_published(PUBLISHED["Gemma-3"], tmp_path)
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    more = [AddedToken(f"<unused{n}>", special=special, normalized=False) for n in range(64)]
    (made.add_special_tokens if special else made.add_tokens)(more)
    made.save(f"{folder}/tokenizer.json")
    if pad:
        change(tmp_path / "tokenizer_config.json", pad_token=pad)
    if pad or not special:
        with one_sentence("tokens for .* embeddings"):
            load_tokenizer(folder)
        return
    policy = load_policy(folder)
    size = policy.model.config.vocab_size
    assert made.token_to_id("<unused63>") >= size
    assert max(policy.encode_chat("a <unused63> b")) < size


@pytest.mark.parametrize("family, rates", [
    ("qwen2", dict(attention_dropout=0.1)),
    ("phi3", dict(embd_pdrop=0.1, resid_pdrop=0.1)),
])
def test_dropout_is_off(tmp_path, family, rates):
    """In training mode, a pass gives the sampler's log-probabilities, again and again."""
    policy = load_policy(write(family, tmp_path, **rates))
    batch = collate(TOKEN_ROWS, [True] * 3, policy.pad_id)
    expected = policy.eval()(batch)[0]
    torch.testing.assert_close(policy.train()(batch)[0], expected, atol=5e-6, rtol=0)


def test_the_decoder_is_that_of_tokenizer_json(tmp_path):
    """Gemma's class has all else as the file has it."""
    folder = write_published(PUBLISHED["Gemma-3"], tmp_path)
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    made.save(f"{folder}/tokenizer.json")
    assert load_tokenizer(folder).decode(made.encode(" go on").ids) == "go on"


def test_an_end_token_that_only_the_class_names(tmp_path):
    """Llama's class has </s>, and would lose the spaces of this byte-level vocabulary."""
    tokens = PIECES._replace(steps="digits", named={"unk_token": "<unk>"})
    tokenizer = load_tokenizer(write_published(Kind("llama", tokens, "</s>", CHATML), tmp_path))
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.decode(tokenizer("go on").input_ids) == "go on"


@pytest.mark.parametrize("family", ["mistral", "ministral", "ministral3"])
def test_mistrals_published_with_the_word_pattern_of_another_family(family, tmp_path):
    tokens = NEMO._replace(steps="llama3")
    folder = write_published(Kind(family, tokens, NEMO_TURN, NEMO_CHAT), tmp_path)
    for load in (load_tokenizer, load_policy):
        with one_sentence("has a wrong tokenizer.json, as many Mistral models"):
            load(folder)
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    made.pre_tokenizer = WORDS_OF_BYTES["tekken"]  # transformers: if there are 100,000 words
    made.save(f"{folder}/tokenizer.json")
    assert load_policy(folder).encode("goOn 12") == made.encode("goOn 12").ids


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_the_attention_that_config_json_names_is_not_needed(key, tmp_path):
    folder = write_published(PUBLISHED["Qwen2.5"], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "flash_attention_2"}))
    assert load_policy(folder).model.config._attn_implementation == "sdpa"


# ---- families ----

CHANGED = "changes its logits"
LENGTH = "gives a row other logits beside a longer one"
LAYER = "in a layer of the type"
LONGROPE = dict(
    original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.1] * 4, long_factor=[4.0] * 4))
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
IN_ONE_KIND_OF_LAYER = dict(
    layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=1e4), full_attention=DYNAMIC))
REFUSED = [  # as published, which for these is not the default of transformers
    ("cohere", {}, CHANGED), ("gemma2", {}, CHANGED), ("phi", {}, CHANGED),
    ("gptj", dict(rotary_dim=4), CHANGED), ("minicpm3", dict(num_key_value_heads=4), CHANGED),
    ("granite", dict(logits_scaling=8.0), CHANGED),
    ("phi3", LONGROPE, LENGTH), ("llama", dict(rope_parameters=DYNAMIC), LENGTH),
    ("gemma3_text", IN_ONE_KIND_OF_LAYER, LENGTH),
    ("gemma3_text", dict(use_bidirectional_attention=True), LENGTH),
    ("qwen3_moe", {}, f"model.layers.0.mlp.experts.gate_up_proj {LAYER} Qwen3MoeExperts"),
    ("mamba", dict(state_size=8), LAYER), ("gpt2", {}, f"attn.c_attn.weight {LAYER} Conv1D"),
    ("lfm2", dict(layer_types=["conv", "full_attention"]), f"conv.conv.weight {LAYER} Conv1d"),
]


@pytest.mark.parametrize("family, settings, reason", REFUSED)
def test_a_plan_and_a_start_refuse_a_family_by_its_config(
    family, settings, reason, tmp_path, config
):
    """However small its logits are, and with positions beyond all rows of the test."""
    folder = write(family, tmp_path / "model", **settings)
    with one_sentence(reason) as planned:
        plan.dry_run(config(model=folder, max_prompt_tokens=200))
    with one_sentence(reason) as started:
        load_policy(folder)
    assert str(started.value) in str(planned.value)


@torch.no_grad()
def test_the_text_part_of_qwen3_5_is_a_model(tmp_path):
    """It is published with a part for pictures, and saved without."""
    write("qwen3_5_text", tmp_path / "text", **KINDS["qwen3_5_text"])
    text = load_config(str(tmp_path / "text")).to_dict()
    eyes = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32)
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=eyes)
    both = AutoModelForImageTextToText.from_config(config)
    both.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    ids = torch.tensor([TOKEN_ROWS[0].prompt_ids])
    expected = both.eval()(ids).logits
    policy.save(tmp_path / "saved")
    again = load_policy(str(tmp_path / "saved")).model
    assert policy.model(ids).logits.equal(expected) and again(ids).logits.equal(expected)
    change(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    with one_sentence("quantized weights"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("family", ["mistral3", "gemma3"])
def test_a_model_that_also_sees_is_refused_by_its_config(family, tmp_path):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with one_sentence("does not only read text .*: use a model for text") as loaded:
        load_tokenizer(str(tmp_path))
    # A plan asks for its memory first, and prints equal sentences once.
    with one_sentence("does not only read text") as sized:
        memory.of_folder(Config(), str(tmp_path), "bf16")
    assert str(sized.value) == str(loaded.value)


def test_vllm_does_not_run_the_part_for_pictures(monkeypatch):
    """That of Qwen3.5 as published, which is not in vLLM's CPU build."""
    config = SimpleNamespace(is_multimodal_model=True)
    monkeypatch.setattr("vllm.EngineArgs.create_model_config", lambda _: config)
    with one_sentence("vLLM would run Qwen/Qwen3.5-4B with its part for pictures"):
        check_model("Qwen/Qwen3.5-4B")


@pytest.mark.slow
def test_vllm_has_the_trainers_log_probs(tmp_path):
    heads = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    folder = write("gemma3_text", tmp_path, **heads)
    sampler = VLLMSampler(folder, 64, "fp32", memory_share=0.2, slots=8)
    torch.set_num_threads(1)
    try:
        policy = load_policy(folder)
        assert gap(policy, sampler) < 1e-4
        assert gap(policy, HFSampler()) < 1e-4
    finally:
        sampler.close()


@pytest.mark.slow
def test_what_vllm_would_run_by_the_trainers_classes_is_refused_before_long_work(
    tmp_path, config, monkeypatch, capsys
):
    """Generating data takes minutes. vLLM would make these classes its own."""
    monkeypatch.setattr(session, "find_tasks", lambda *args: pytest.fail("too late"))
    folder = write("olmo2", tmp_path / "model")
    cfg = config(model=folder, max_prompt_tokens=128, sampler="vllm")
    for start in (train.train, plan.dry_run):
        with one_sentence("no code of its own for the family olmo2 .*: use --sampler transformers"):
            start(cfg)
        monkeypatch.undo()  # a plan has the data as well
    assert "training tasks" in capsys.readouterr().out


# ---- the folder of an exported policy. LoRA: test_lora.py ----


def test_an_exported_folder(finished, tmp_path, capsys):
    out = tmp_path / "plain"
    export.main([str(finished), "--out", str(out)])
    said = capsys.readouterr().out
    assert f"plain: the policy of {finished}/checkpoint-000001, for transformers 5." in said
    modes = {path.name: path.stat().st_mode for path in out.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # others may read the weights, too
    ours = load_file(out / "model.safetensors")
    for name, weight in load_file(finished / "checkpoint-000001/model.safetensors").items():
        assert torch.equal(ours[name], weight.bfloat16()) and weight.dtype == torch.float32


def test_a_folder_with_files_stays_as_it_is(finished, tmp_path):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with one_sentence("is not empty: give a new folder"):
        export.main([str(finished), "--out", str(finished)])
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with one_sentence("has no checkpoint: give the folder of a run, runs/NAME"):
        export.main([str(tmp_path / "nothing"), "--out", "nowhere"])
