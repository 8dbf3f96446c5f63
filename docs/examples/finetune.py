"""Continue a model in Hugging Face's format on text files, and write the result in the same format.

python docs/examples/finetune.py Llama-3.2-1B 'corpus/*.txt' finetuned --ranks 8 data.seq_len=131072 trainer.steps=1000
"""

import argparse
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="a folder with config.json, *.safetensors and tokenizer.json")
parser.add_argument("text", help="a text file, a folder of text files, or a pattern")
parser.add_argument("output", help="the new folder")
parser.add_argument("--ranks", type=int, default=1, help="the number of GPUs, or of CPU processes")
args, settings = parser.parse_known_args()  # all other arguments are settings of training

# The settings of the model and the tokenizer come from the folder. If the training is interrupted, the same command resumes it.
name = f"{Path(args.output).name}-training"
launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
settings = [f"trainer.init_from={args.model}", "data=text", f"data.path={args.text}", *settings, f"name={name}"]
train = [*launcher, "-m", "ringattn.train.run", *settings]
export = [sys.executable, "-m", "ringattn.train.export", f"run={name}", f"output={args.output}"]
sys.exit(subprocess.run(train).returncode or subprocess.run(export).returncode)
