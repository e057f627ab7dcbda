"""Download of a checkpoint from the Hugging Face Hub: REPOSITORY REVISION DIRECTORY.

Files that exist already are kept. Credentials come from HF_TOKEN.
"""

import sys

from huggingface_hub import snapshot_download

repository, revision, directory = sys.argv[1:]
snapshot_download(
    repository,
    revision=revision,
    local_dir=directory,
    allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"],
)
print(f"{repository} at {revision} lies in {directory}")
