"""Models that are not as they should be: with code, without a folder, a network or a base."""

import json
import os
import shutil
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import peft
import pytest
import torch
from huggingface_hub import constants, hf_api
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from paw_min.base.errors import UserError
from paw_min.base.hub import ask
from paw_min.config import Config
from paw_min.model import lora
from paw_min.model.batches import collate
from paw_min.model.loading import load_policy, load_tokenizer
from paw_min.model.sampler import HFSampler, Request
from paw_min.retrieval.dense import Encoder
from paw_min.running import memory
from tests.helpers import TOKEN_ROWS, change, make_policy, one_sentence
from tests.retrieval import make_encoder

# ---- damaged folders ----


def edit(name: str, **values):
    """Change these values in a JSON file of the folder; None removes one."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | values
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return damage


def without(name: str):
    return lambda folder: (folder / name).unlink()


def template(text: str):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def weights(**values):
    """Change these weights; None removes one."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = load_file(path) | values
        kept = {name: value for name, value in content.items() if value is not None}
        save_file(kept, path, metadata={"format": "pt"})

    return damage


def more_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["new1", "new2"])
    tokenizer.save_pretrained(folder)


def cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 50_000)


UP = "model.layers.1.mlp.up_proj.weight"
LAST_TOKEN = torch.zeros(25, 32)  # a head with a NaN in one token's weights
LAST_TOKEN[24, 0] = torch.nan
CONSTANT = "{{ 'hello, what is in it' }}"
BY_FILES = [  # what a plan knows, too
    (without("config.json"), "no config.json: give .* or checkpoint-... of a run"),
    (without("tokenizer.json"), "has no tokenizer.json: copy"),
    (more_tokens, "27 tokens for 25 embeddings"),
    (edit("generation_config.json", eos_token_id=[2, 128009]), "end tokens .*128009.*0 to 24"),
    (edit("generation_config.json", eos_token_id=[2, 25]), "end tokens .*25.*0 to 24"),
    (edit("config.json", quantization_config={"quant_method": "mxfp4"}), "quantized weights"),
    (without("chat_template.jinja"), "has no chat template"),
    (template("{% for"), "cannot be loaded .*unexpected"),
    (template("{{ messages[0].x.y }}"), "cannot be loaded .*no attribute"),
    (template("{{ raise_exception('tools only') }}"), "cannot be loaded .*tools only"),
    *[(template(text), "template that leaves out the user's message or changes it") for text in (
        "<user>{{ messages[0].role }}", CONSTANT, "{{ messages[0].content[:9] }}",
        "{{ messages[0].content | upper }}")],
]
BY_WEIGHTS = [
    (edit("config.json", num_hidden_layers=1, layer_types=["full_attention"]),
     "has weights for model.layers.1.*, which its config.json does not"),
    (cut_weights, "not fully covered"),
    (weights(**{UP: None}), f"no weights for {UP}"),
    (weights(**{"model.norm.weight": torch.full([32], torch.nan)}), "weights that are NaN"),
    # The logits are infinite, and none is NaN.
    (weights(**{"model.norm.weight": torch.tensor([torch.inf] + 31 * [1.0])}), "or infinite"),
    (weights(**{"lm_head.weight": LAST_TOKEN}), "or infinite"),
]


@pytest.mark.parametrize("damage, reason", BY_FILES + BY_WEIGHTS)
def test_a_damaged_folder_is_one_sentence_the_same_in_a_plan(tmp_path, damage, reason):
    make_policy("qwen3").save(tmp_path)
    loads = [load_policy]
    if (damage, reason) in BY_FILES:
        loads.append(load_tokenizer)
    for load in loads:
        load(str(tmp_path))
    damage(tmp_path)
    for load in loads:
        with one_sentence(reason) as error:
            load(str(tmp_path))
        assert str(tmp_path) in str(error.value) or "Qwen3ForCausalLM" in str(error.value)


@pytest.mark.parametrize("settings", [
    {"output_attentions": True}, {"output_hidden_states": True}, {"return_dict": False},
    {"torchscript": True}, {"is_encoder_decoder": True},
    {"use_cache": False}, {"temperature": 0.7, "do_sample": True, "repetition_penalty": 1.3},
    {"output_scores": True, "return_dict_in_generate": True}, {"gradient_checkpointing": True},
    {"output_attentions": True, "output_hidden_states": True, "return_dict": False,
     "_attn_implementation": "eager"},
], ids=str)
def test_what_config_json_switches_on_is_off_and_can_be_saved(settings, tmp_path):
    def played(policy) -> tuple[Tensor, list[int]]:
        sampler, request = HFSampler(), Request(0, [3, 9, 10], 1)
        with sampler.sync(policy):
            ((response,),) = sampler.generate(deque([request]), 1.0, 4)
        return policy(collate(TOKEN_ROWS, [True] * 3, pad_id=0)).logp, response.ids

    plain = make_policy("qwen3")
    plain.save(tmp_path / "start")
    logp, ids = played(plain)
    edit("config.json", **settings)(tmp_path / "start")
    edit("generation_config.json", **settings)(tmp_path / "start")
    for folder in ("start", "saved"):
        policy = load_policy(str(tmp_path / folder))
        again = played(policy)
        assert torch.equal(again[0], logp) and again[1] == ids
        policy.save(tmp_path / "saved")


def test_a_setting_that_transformers_computes_is_refused(tmp_path):
    make_policy("qwen3").save(tmp_path)
    edit("config.json", use_return_dict=False)(tmp_path)
    with one_sentence("cannot be loaded .*use_return_dict"):
        load_tokenizer(str(tmp_path))


def test_settings_that_cannot_be_saved_are_refused_by_a_plan(tmp_path, monkeypatch):
    make_policy("qwen3").save(tmp_path)

    def fail(config, folder):
        raise ValueError("these settings cannot be saved")

    monkeypatch.setattr(Qwen3Config, "save_pretrained", fail)
    with one_sentence("cannot be loaded .these settings cannot be saved"):
        load_tokenizer(str(tmp_path))


def test_a_run_folder_is_no_model(finished):
    for load in (load_tokenizer, load_policy):
        with one_sentence(f"{finished} is a run.*{finished}/checkpoint-000001"):
            load(str(finished))


def test_a_tokenizer_without_an_end_token_gets_the_models(tmp_path):
    make_policy("qwen3").save(tmp_path)
    edit("tokenizer_config.json", eos_token=None, pad_token=None)(tmp_path)
    load_tokenizer(str(tmp_path))
    policy = load_policy(str(tmp_path))
    assert policy.tokenizer.eos_token is policy.tokenizer.pad_token is None
    assert policy.eos_ids == [2] and policy.pad_id == 2
    edit("generation_config.json", eos_token_id=None)(tmp_path)
    edit("config.json", eos_token_id=None)(tmp_path)
    for load in (load_tokenizer, load_policy):
        with one_sentence(r"has the end tokens \[\]: one or more of 0 to 24"):
            load(str(tmp_path))


# ---- code and pickles ----


CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
Path({marker!r}).touch()

class C(PretrainedConfig):
    model_type = "own"

class T(PreTrainedTokenizerFast):
    pass

class M(Qwen3ForCausalLM):
    config_class = C
"""


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """The folder of a model with code of its own, for a user who answers y to every question."""
    folder = tmp_path / "model"
    make_policy("qwen3").save(folder)
    (folder / "code.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    yield folder
    assert not (tmp_path / "ran").exists()


def encoder_of_modules(folder: str) -> Encoder:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "code.M"}]
    Path(folder, "modules.json").write_text(json.dumps(modules))
    return Encoder(folder)


@pytest.mark.parametrize("load", [
    load_tokenizer, load_policy, Encoder, encoder_of_modules,
    lambda folder: memory.check(Config(), folder, "fp32", "cpu"),
])
def test_no_code_of_a_model_is_run(with_code, load):
    """On a terminal, transformers asks whether to run it."""
    classes = {"AutoConfig": "code.C", "AutoModel": "code.M", "AutoModelForCausalLM": "code.M"}
    change(with_code / "config.json", auto_map=classes, model_type="own", architectures=["M"])
    with one_sentence("code of its own, which is not run|custom code", ValueError):
        load(str(with_code))


class Bomb:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize("load, name", [
    (load_policy, "pytorch_model.bin"), (Encoder, "pytorch_model.bin"),
    (load_policy, "adapter_model.bin"),
])
def test_no_pickle_with_code_is_run_or_proposed(tmp_path, load, name):
    """torch's sentence names weights_only=False, with which it would run."""
    folder = tmp_path / "model"
    make_policy("qwen3").save(folder)
    if name == "adapter_model.bin":
        policy = load_policy(str(folder))
        lora.attach(policy.model, 4, "fp32", 0, None)
        folder = tmp_path / "adapter"
        policy.save(folder)
    (folder / name.replace("pytorch_", "").replace(".bin", ".safetensors")).unlink()
    torch.save({"x": Bomb()}, folder / name)
    with one_sentence("it is damaged, or has code in it, which is not run", ValueError) as error:
        load(str(folder))
    assert "weights_only" not in str(error.value)


def test_no_code_of_a_tokenizer_is_run(with_code):
    auto_map = {"AutoTokenizer": [None, "code.T"]}
    change(with_code / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="T")
    change(with_code / "config.json", model_type="smollm3")
    with pytest.raises(UserError, match="has code of its own, which is not run"):
        load_tokenizer(str(with_code))


# ---- adapters ----

ADAPTERS = [  # settings of peft's LoraConfig, tied embeddings, and whether it can be merged
    ({}, False, True), (dict(use_dora=True), False, True), (dict(use_rslora=True), False, True),
    (dict(alpha_pattern={"q_proj": 32}, bias="all"), True, True),
    (dict(modules_to_save=["norm", "lm_head"]), False, True),
    (dict(trainable_token_indices=[2, 20]), True, True),
    (dict(layer_replication=[[0, 2], [1, 2]]), False, False),
    (dict(layer_replication=[[0, 1], [0, 1]]), False, False),  # as many layers as before
    (dict(modules_to_save=["embed_tokens"]), True, False),
    (dict(target_modules=["embed_tokens", "q_proj"]), True, False),
    (dict(alora_invocation_tokens=[11]), False, False),
]


@pytest.mark.parametrize("settings, tied, is_merged", ADAPTERS)
@torch.no_grad()
def test_an_adapter_is_merged_or_refused(tmp_path, settings, tied, is_merged):
    """What peft computes with it, and what a saved folder computes again."""
    make_policy("llama", tie_word_embeddings=tied).save(tmp_path / "start")
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    usual = dict(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    adapted = peft.get_peft_model(start, peft.LoraConfig(**usual | settings)).eval()
    generator = torch.Generator().manual_seed(0)
    for p in adapted.parameters():
        if p.requires_grad:
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    adapted.save_pretrained(tmp_path / "adapter")
    for path in (tmp_path / "start").iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path / "adapter")
    if not is_merged:
        with one_sentence("cannot be added to the weights of its start|does not support merging"):
            load_policy(str(tmp_path / "adapter"))
        return
    ids = torch.tensor([[3, 9, 10, 11, 5, 2, 20, 12]])
    policy = load_policy(str(tmp_path / "adapter"))
    policy.save(tmp_path / "merged")
    for model in (policy.model, load_policy(str(tmp_path / "merged")).model):
        torch.testing.assert_close(model(ids).logits, adapted(ids).logits, atol=1e-4, rtol=0)


# ---- the hub ----


class Unavailable(BaseHTTPRequestHandler):
    def do_GET(self):
        if "agent-harnesses" not in self.path:  # which program asks? Kept for a day
            self.server.asked.append(self.path)
        self.send_error(503)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that is out of order, and an empty cache -> the requests to it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with HTTPServer(("127.0.0.1", 0), Unavailable) as server:
        server.asked = []
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(hf_api.api, "endpoint", constants.ENDPOINT)  # sentence-transformers'
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        ask.cache_clear()
        yield server.asked
        server.shutdown()


def put_in_cache(name: str, folder, tmp_path) -> None:
    """Like a download of the model me/NAME."""
    cached = tmp_path / "cache" / f"models--me--{name}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(40 * "a")
    shutil.copytree(folder, cached / "snapshots" / (40 * "a"))


def test_without_a_network_the_cache_is_used_after_one_request(hub, tmp_path, model, capsys):
    """transformers made 95 requests, for eight minutes."""
    put_in_cache("policy", model, tmp_path)
    policy = load_policy("me/policy")
    assert len(hub) == 1 and os.environ["HF_HUB_OFFLINE"] == "1"
    assert "me/policy: its copy in the cache is used" in capsys.readouterr().out
    ours = policy.model.state_dict()
    theirs = load_policy(model).model.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_an_encoder_in_the_cache_takes_one_request_and_one_in_a_folder_none(
    hub, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = Path(make_encoder(tmp_path / "encoder"))
    Path("me").mkdir()
    Path("me/encoder").symlink_to(folder)  # also a valid name on the hub
    vector = Encoder("me/encoder").queries(["a"])
    assert hub == []
    put_in_cache("cached", folder, tmp_path)
    assert (Encoder("me/cached").queries(["a"]) == vector).all()
    assert len(hub) == 1


def test_what_is_nowhere_is_one_sentence(hub, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="the model no/such cannot be loaded .no such folder, and"):
        load_tokenizer("no/such")
    assert len(hub) == 1
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("/no/such/dir", "runs/r/checkpoint-000001", f"{tmp_path}/link"):
        with pytest.raises(UserError, match=f"^the folder {name} does not exist: give a model"):
            load_tokenizer(name)
    with pytest.raises(ValueError, match="encoder .*the folder /no/such does not exist"):
        Encoder("/no/such")
    assert len(hub) == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="^the folder runs/r/checkpoint-000001 does not exist"):
        load_tokenizer("runs/r/checkpoint-000001")


def test_an_adapter_without_its_start(hub, tmp_path, monkeypatch):
    """From another working folder, and without a configuration, as peft writes an adapter."""
    make_policy("qwen3").save(tmp_path / "data" / "start")
    monkeypatch.chdir(tmp_path)
    policy = load_policy("data/start")
    lora.attach(policy.model, 4, "fp32", 0, None)
    policy.save(tmp_path / "adapter")
    load_policy("adapter")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(UserError, match="the folder ./data/start does not exist"):
        load_policy(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "config.json").unlink()
    with one_sentence("no config.json: copy config.json and the tokenizer of ./data/start into"):
        load_tokenizer(str(tmp_path / "adapter"))
