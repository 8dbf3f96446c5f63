"""Train a long-context GPT over a ring of ranks: `torchrun --nproc_per_node=N train/run.py [overrides]`."""

from importlib.util import find_spec

# The import names of the packages in the extra `train` of pyproject.toml.
PACKAGES = ("datasets", "filelock", "huggingface_hub", "hydra", "matplotlib", "safetensors", "wandb", "xxhash")

if missing := [name for name in PACKAGES if find_spec(name) is None]:
    raise ImportError(f"training needs {', '.join(missing)}: install the extra, pip install 'ringattn[train]' or '.[train]'")
