"""Python code that runs a model: each means the query that was read by hand, and no code is run."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from sizer.base.errors import ConfigError
from sizer.pasted.formats import read_config
from sizer.pasted.inference import read_inference, server_command
from sizer.pasted.reading import read_question
from sizer.query.text import parse_query


class Code(NamedTuple):
    """Code, and what it means."""

    text: str
    query: str
    unmatched: tuple[str, ...] = ()


CODES = {
    "FLUX, offloaded": Code(
        """
import torch
from diffusers import FluxPipeline
pipe = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16)
pipe.enable_model_cpu_offload()
image = pipe("a cat", height=768, width=1360, guidance_scale=3.5, max_sequence_length=256).images[0]
""",
        "arch=diffusers:flux.1-dev&mode=inference&dtype=bfloat16&batch=1&seq=256&image=768x1360&offload=model",
    ),
    "SDXL, several images": Code(
        """
model_id = "stabilityai/stable-diffusion-xl-base-1.0"
pipe = StableDiffusionXLPipeline.from_pretrained(model_id, torch_dtype=torch.float16, variant="fp16").to("cuda")
pipe.enable_vae_slicing(); pipe.vae.enable_tiling()
pipe.load_lora_weights("somebody/something")
torch.set_float32_matmul_precision("high")
images = pipe(prompt=["a", "b"], num_images_per_prompt=2, height=768, width=1344, guidance_scale=0.0).images
""",
        "arch=diffusers:sdxl&mode=inference&dtype=float16&batch=4&image=768x1344&vae=tiling,slicing&guidance=0",
        ("pipe.load_lora_weights()",),
    ),
    "parts quantized by one config": Code(
        """
config = PipelineQuantizationConfig(
    quant_backend="bitsandbytes_4bit",
    quant_kwargs={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    components_to_quantize=["transformer", "text_encoder_2"],
)
pipe = DiffusionPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", quantization_config=config, torch_dtype=torch.bfloat16)
pipe.to("cuda")
""",
        "arch=diffusers:flux.1-dev&mode=inference&dtype=bfloat16&weights=transformer:nf4,text_encoder_2:nf4",
    ),
    "a part loaded by itself": Code(
        """
quant = DiffusersBitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
transformer = SD3Transformer2DModel.from_pretrained(repo, subfolder="transformer", quantization_config=quant)
pipe = StableDiffusion3Pipeline.from_pretrained(
    "stabilityai/stable-diffusion-3-medium-diffusers", transformer=transformer, text_encoder_3=None, torch_dtype=torch.float16)
pipe.enable_sequential_cpu_offload()
pipe("a cat", output_type="latent")
""",
        "arch=diffusers:sd3-medium&mode=inference&dtype=float16&batch=1&weights=transformer:nf4-dq&offload=sequential"
        "&without=text_encoder_3&output=latent",
    ),
    "a video, blocks offloaded": Code(
        """
pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-14B-Diffusers", vae=vae, torch_dtype=torch.bfloat16)
apply_group_offloading(pipe.transformer, onload_device=onload, offload_device=host, offload_type="block_level",
                       num_blocks_per_group=4, use_stream=True)
output = pipe(prompt="x", height=480, width=832, num_frames=81, guidance_scale=5.0).frames[0]
""",
        "arch=diffusers:wan2.1-t2v-14b&mode=inference&dtype=bfloat16&batch=1&image=480x832&frames=81&offload=group-block:4&stream=1",
    ),
    "a repository without a preset": Code(
        'pipe = DiffusionPipeline.from_pretrained("somebody/something").to("cuda")',
        "arch=diffusers:somebody/something&mode=inference&dtype=float32",
    ),
    "4 bits and generation": Code(
        """
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1", device_map="auto",
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16))
out = model.generate(**inputs, max_new_tokens=256)
""",
        "arch=hf:mistral-7b-v0.1&mode=generate&dtype=bfloat16&batch=1&seq=1024&weights=fp4&new=256",
    ),
    "transformers' pipeline": Code(
        'pipe = pipeline("text-generation", model="Qwen/Qwen2.5-7B-Instruct", torch_dtype="auto", device_map="auto")',
        "arch=hf:qwen2.5-7b&mode=generate&dtype=bfloat16&batch=1&seq=1024",
    ),
    "a classifier": Code(
        'model = AutoModelForImageClassification.from_pretrained("google/vit-base-patch16-224", attn_implementation="eager")',
        "arch=hf:vit-base-patch16-224&mode=inference&dtype=float32&batch=1&attention=eager",
    ),
}


@pytest.mark.parametrize("name", CODES)
def test_code_means_what_was_read_by_hand(name):
    text, query, unmatched = CODES[name]
    found = read_inference(text)
    asked = "&".join(f"{key}={value}" for key, value in found.items.items())
    assert parse_query(asked) == parse_query(query)
    assert found.unmatched == unmatched
    assert found.kind == "code" and found.read


@pytest.mark.parametrize(
    "text", ["tokenizer = AutoTokenizer.from_pretrained('Qwen/Qwen3-8B')", "x = pipeline()", "model.generate(x)", "", "(" * 60_000]
)
def test_other_code_is_none(text):
    assert read_inference(text) is None and server_command(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "q = BitsAndBytesConfig(load_in_4bit=True)\n"  # fp4, which a pipeline's query does not have
        "t = FluxTransformer2DModel.from_pretrained('a/b', subfolder='transformer', quantization_config=q)\n"
        "pipe = FluxPipeline.from_pretrained('black-forest-labs/FLUX.1-dev', transformer=t)",
        "t = FluxTransformer2DModel.from_pretrained('a/b', subfolder='transformer', quantization_config=TorchAoConfig('int8wo'))\n"
        "pipe = FluxPipeline.from_pretrained('black-forest-labs/FLUX.1-dev', transformer=t)",
        "config = PipelineQuantizationConfig(quant_backend='quanto', components_to_quantize=['transformer'])\n"
        "pipe = FluxPipeline.from_pretrained('black-forest-labs/FLUX.1-dev', quantization_config=config)",
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B', quantization_config=HqqConfig(nbits=4))",
    ],
)
def test_a_quantization_that_is_not_read_is_said(text):
    found = read_inference(text)
    assert "weights" not in found.items
    assert [line for line in found.unmatched if line.startswith("quantization_config")]


def test_an_argument_whose_value_is_not_in_the_text_is_said():
    found = read_inference('pipe = DiffusionPipeline.from_pretrained("a/b").to("cuda")\npipe("x", height=side, width=512, seed=s)')
    assert found.unmatched == ("height: its value is not in the text",) and "image" not in found.items


def test_the_class_of_vllm_is_a_server():
    code = """
from vllm import LLM, SamplingParams
llm = LLM("meta-llama/Llama-3.1-8B", tensor_parallel_size=2, max_model_len=8192, enforce_eager=True, trust_remote_code=False)
"""
    command = "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 --max-model-len 8192 --enforce-eager"
    assert server_command(code) == (command, (), True)
    assert server_command(code.replace("8192", "length"))[1] == ("max_model_len",)
    assert "max_model_len: its value is not in the text" in read_question(code.replace("8192", "length"), None).unmatched
    assert server_command(code.replace("from vllm", "from langchain.llms")) is None, "another library has a class of this name"


@pytest.mark.parametrize(
    ("text", "todo"),
    [
        ("ollama run llama3.1:8b", "llama.cpp"),
        ("text-generation-launcher --model-id meta-llama/Llama-3.1-8B", "Serving"),
        ("llamafactory-cli train examples/train_lora/llama3_lora_sft.yaml", "YAML file"),
        ("tune run lora_finetune_single_device --config llama3_1/8B_lora_single_device", "tune cp"),
        ("torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py", "sizer run"),
        ("| NVIDIA-SMI 550.54.15 |\n|   0  NVIDIA GeForce RTX 4090        Off |", "gpu=rtx-4090"),
    ],
)
def test_another_program_is_named_with_what_to_do(text, todo):
    with pytest.raises(ConfigError, match=todo):
        read_config(text)


def test_classes_of_other_servers_are_commands():
    engine = 'import sglang as sgl\nllm = sgl.Engine(model_path="Qwen/Qwen3-8B", mem_fraction_static=0.8, tp_size=2)'
    found = read_question(engine, None)
    assert found.items == {"arch": "hf:qwen3-8b", "mode": "serve", "engine": "sglang", "util": "0.8", "tp": "2"}
    config = """from ray.serve.llm import LLMConfig
config = LLMConfig(
    model_loading_config=dict(model_id="qwen", model_source="Qwen/Qwen3-8B"),
    engine_kwargs=dict(tensor_parallel_size=2, max_model_len=length),
)"""
    found = read_question(config, None)
    assert found.items == {"arch": "hf:qwen3-8b", "mode": "serve", "tp": "2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm bench serve --model Qwen/Qwen3-8B", "a benchmark is not planned"),
        ("python -m sglang.bench_one_batch --model-path Qwen/Qwen3-8B", "paste the command that starts the server"),
        ("lms load qwen/qwen3-8b --gpu max", "the engine llama.cpp, which LM Studio runs"),
        ("NAME  ID  SIZE  PROCESSOR  CONTEXT  UNTIL\nqwen3:14b  bd  12 GB  100% GPU  16384  now", "what Ollama has loaded"),
        ("CUDA error: out of memory\n  in function alloc at /build/ggml/src/ggml-cuda/ggml-cuda.cu:491", "names no buffer"),
    ],
)
def test_other_programs_of_servers_are_refused_by_name(text: str, said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_question(text, None)


@pytest.mark.parametrize(
    ("text", "query"),
    [
        (
            """import torch, torchvision
model = torchvision.models.resnet50(weights="DEFAULT", num_classes=10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(ds, batch_size=128)
with torch.autocast("cuda", dtype=torch.float16):
    loss = criterion(model(images), labels)
loss.backward()""",
            "arch=torchvision:resnet50&mode=training&classes=10&batch=128&optimizer=sgd-momentum&dtype=amp-float16",
        ),
        (
            """from torchvision.models.detection import fasterrcnn_resnet50_fpn
model = fasterrcnn_resnet50_fpn(weights=None).to(device)
model(torch.rand(2, 3, 480, 640, device=device))""",
            "arch=torchvision:fasterrcnn_resnet50_fpn&mode=inference&batch=2&image=480x640&dtype=float32",
        ),
        (
            """import timm, torch
model = timm.create_model("convnext_base", pretrained=True).cuda().eval().half()
y = torch.compile(model)(torch.randn(32, 3, 224, 224, device="cuda"))""",
            "arch=timm:convnext_base&mode=inference&batch=32&image=224x224&dtype=float16&compile=default",
        ),
        (
            """from sentence_transformers import SentenceTransformer
model = SentenceTransformer("BAAI/bge-m3", device="cuda")
model.encode(sentences, batch_size=64)""",
            "arch=hf:bge-m3&mode=inference&batch=64&dtype=float32",
        ),
        (
            """from llama_cpp import Llama
llm = Llama(model_path="./Qwen3-8B-Q4_K_M.gguf", n_gpu_layers=-1, n_ctx=8192)""",
            "arch=hf:qwen3-8b&mode=serve&engine=llama.cpp&weights=q4_k_m&max_model_len=8192&max_num_seqs=1&fa=0",
        ),
        (
            """from ctransformers import AutoModelForCausalLM
name = "TheBloke/Mistral-7B-v0.1-GGUF"
llm = AutoModelForCausalLM.from_pretrained(name, model_file="mistral-7b-v0.1.Q4_K_M.gguf", gpu_layers=20)""",
            "arch=hf:mistral-7b-v0.1&mode=serve&engine=llama.cpp&weights=q4_k_m&gpu_layers=20&max_num_seqs=1&max_model_len=512&fa=0",
        ),
        (
            """from diffusers import StableDiffusionXLPipeline
pipe = StableDiffusionXLPipeline.from_single_file("./x.safetensors", torch_dtype=torch.float16).to("cuda")
pipe("a cat", num_images_per_prompt=2)""",
            "arch=diffusers:sdxl&mode=inference&dtype=float16&batch=2",
        ),
        (
            """from transformers import Qwen2_5_VLForConditionalGeneration
model = Qwen2_5_VLForConditionalGeneration.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct", torch_dtype="auto")
model.generate(**inputs, max_new_tokens=128)""",
            "arch=hf:qwen2.5-vl-7b&mode=generate&dtype=bfloat16&new=128&batch=1&seq=1024",
        ),
        (
            """m = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=5).cuda()""",
            "arch=hub:google-bert/bert-base-cased&mode=inference&dtype=float32&batch=1&head=AutoModelForSequenceClassification",
        ),
        (
            """from unsloth import FastVisionModel
model, tokenizer = FastVisionModel.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct", load_in_4bit=True)""",
            "arch=hf:qwen2.5-vl-7b&mode=inference&dtype=bfloat16&batch=1&weights=nf4",
        ),
    ],
)
def test_code_of_other_packages_is_read(text, query):
    found = read_question(text, None)
    assert found.items == dict(item.split("=") for item in query.split("&"))
    parse_query(query)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "model=Qwen/Qwen3-8B\ndocker run ghcr.io/huggingface/text-generation-inference:3.3 --model-id $model "
            "--max-total-tokens 8192",
            "for example, mode=serve&arch=hf:qwen3-8b&max_model_len=8192",
        ),
        ("trtllm-serve Qwen/Qwen3-8B --tp_size 2 --max_seq_len 4096", "mode=serve&arch=hf:qwen3-8b&tp=2&max_model_len=4096"),
        ('from tensorrt_llm import LLM\nllm = LLM(model="Qwen/Qwen3-8B")', "the scheduler of TensorRT-LLM is not planned"),
        ("tritonserver --model-repository=/models", "paste model.json of the backend vllm"),
        ("docker run nvcr.io/nim/meta/llama-3.1-8b-instruct:latest", "paste its log"),
        ("lmdeploy serve api_server Qwen/Qwen3-8B --tp 2 --session-len 32768", "arch=hf:qwen3-8b&tp=2&max_model_len=32768"),
        ("from lmdeploy import pipeline\npipe = pipeline('Qwen/Qwen3-8B')", "for example, mode=serve&arch=hf:qwen3-8b"),
        ("mlc_llm serve HF://mlc-ai/Llama-3-8B-Instruct-q4f16_1-MLC", "the scheduler of MLC LLM is not planned"),
        ("model:\n  model_name: Llama-exl2\n  max_seq_len: 32768\n  cache_mode: Q4", "ExLlama and TabbyAPI are not planned"),
        ("lms load qwen/qwen3-8b --context-length 8192", "mode=serve&engine=llama.cpp&arch=hf:qwen3-8b&max_model_len=8192"),
        ("python ktransformers/server/main.py --model_path Qwen/Qwen3-30B-A3B --tp 2", "arch=hf:qwen3-30b-a3b&pp=2"),
        ('import mii\nclient = mii.serve("Qwen/Qwen3-8B", tensor_parallel=2)', "DeepSpeed-MII is not planned"),
        ("mlx_lm.server --model mlx-community/Qwen3-8B-4bit", "the Mac as device, with the engine llama.cpp"),
        ("./llama-bench -m Qwen3-8B-Q8_0.gguf -ngl 99 -p 512", "a benchmark is not planned"),
        ("python server.py --model x --loader llama.cpp", "text-generation-webui is not read"),
        ("infinity_emb v2 --model-id BAAI/bge-small-en-v1.5", "the task Inference"),
    ],
)
def test_servers_that_are_not_planned_are_refused_with_a_query(text: str, said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_question(text, None)


def test_transformers_server_answers_one_request():
    found = read_question("transformers serve Qwen/Qwen3-8B --port 8000 --quantization bnb-4bit --continuous-batching", None)
    assert found.items == {
        **{"mode": "generate", "arch": "hf:qwen3-8b", "dtype": "bfloat16", "weights": "nf4-dq", "batch": "1", "seq": "1024"},
    }
    assert found.unmatched == ("--continuous-batching: its paged cache takes a share of the free memory; one request is counted",)
    found = read_question("transformers serve --force-model Qwen/Qwen3-8B --dtype float16 --attn-implementation eager", None)
    assert (found.items["arch"], found.items["dtype"], found.items["attention"]) == ("hf:qwen3-8b", "float16", "eager")
    found = read_question("transformers serve --attn-implementation other", None)
    assert ("arch" in found.items, found.unmatched) == (False, ("--attn-implementation other",))


def test_what_code_of_vision_does_not_say_is_named():
    code = "import torchvision\nm = torchvision.models.resnet18(num_classes=n)\nopt = torch.optim.SGD(p, momentum=args.m)"
    found = read_question(code, None)
    assert found.items["optimizer"] == "sgd-momentum"
    assert found.unmatched == ("num_classes: its value is not in the text",)
    found = read_question("import torchvision\nm = torchvision.models.resnet18()\nloss.backward()", None)
    assert any(line.startswith("optimizer=adamw: ") for line in found.assumed)
