"""Makes the models that engines are compared on, in the forms that the engines read.

    python benchmarks/peers/prepare.py OUT

SmolLM2-135M as a Hugging Face directory and as a GGUF file, both bf16, of the packaged weights; the
configs in benchmarks/models, those that rivals cannot make up themselves with random weights. Runs in
kvspan's environment; what is there already is left alone.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize
from safetensors.torch import save_file

from kvspan.loading.gguf import open_gguf
from kvspan.loading.gguf_tokenizer import build_tokenizer
from kvspan.loading.resolve import locate
from kvspan.testing.checkpoints import write_checkpoint, write_tokenizer
from kvspan.topology import Span

CONFIGS = Path(__file__).parent.parent / "models"


def write_smollm2(out: Path) -> None:
    """The packaged weights as a Hugging Face directory."""
    checkpoint = open_gguf(locate("smollm2-135m"))
    weights = {
        tensor.name: tensor.read([Span(0, size) for size in tensor.shape]).bfloat16().contiguous()
        for tensor in checkpoint.tensors({})
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    more = {"model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu"}
    (out / "config.json").write_text(json.dumps({**checkpoint.raw_config, **more}))
    build_tokenizer(checkpoint.file.metadata, where=checkpoint.where).save(str(out / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (out / "tokenizer_config.json").write_text(json.dumps(kind))


def write_smollm2_gguf(out: Path) -> None:
    """The packaged file again, its matrices in bf16."""
    reader = GGUFReader(locate("smollm2-135m"))
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = GGUFWriter(out / "model.gguf", fields["general.architecture"].contents())
    for name, field in fields.items():
        if name in ("general.architecture", "general.file_type"):
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(
            name, field.contents(), kind, inner if kind == GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        narrow = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
        writer.add_tensor(tensor.name, narrow, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_random(out: Path) -> None:
    """A config of `CONFIGS` with random weights and a tokenizer of bytes."""
    raw_config = json.loads((CONFIGS / out.name / "config.json").read_text())
    write_checkpoint(out, raw_config, seed=0, dtype=torch.bfloat16)
    write_tokenizer(out, vocab_size=raw_config["vocab_size"])


def write_config(out: Path) -> None:
    """A config of `CONFIGS` alone."""
    shutil.copy(CONFIGS / out.name / "config.json", out)


def main() -> None:
    """Makes what is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    models: dict[str, Callable[[Path], None]] = {
        "smollm2": write_smollm2,
        "smollm2-gguf": write_smollm2_gguf,
        "long-llama": write_random,
        "long-mla": write_config,
    }
    for name, write in models.items():
        if not (out / name).exists():
            unfinished = out / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            (unfinished / name).mkdir(parents=True)
            write(unfinished / name)
            (unfinished / name).rename(out / name)
            unfinished.rmdir()
        print(out / name)


if __name__ == "__main__":
    main()
