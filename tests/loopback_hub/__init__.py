"""A small stand-in for the Hugging Face Hub, on 127.0.0.1, for tests that stay on this machine.

It speaks the part of the Hub's HTTP interface that ``kernels`` and ``huggingface_hub`` use:
downloads (refs, trees, revisions, files), uploads (regular and LFS files, atomic commits),
branches, tags, and the trust flag of a publisher. ``store`` holds repositories and knows nothing
of HTTP; ``server`` turns requests into calls of the store.

    with LoopbackHub(folder, trusted_publishers=["acme"]) as hub:
        hub.store.create_repository("kernel", "acme/flash-attn-norm")
        hub.store.add_folder("kernel", "acme/flash-attn-norm", "v1", path, "build")
        subprocess.run(command, env={**os.environ, **hub.environment(), "HF_HOME": str(cold_cache)})

huggingface_hub reads ``HF_ENDPOINT`` when it is imported, so the variables must be set before
Python starts. By hand: ``python -m loopback_hub FOLDER --port 8800``.
"""

from loopback_hub.server import LoopbackHub, Request
from loopback_hub.store import HubError, HubStore

__all__ = ["HubError", "HubStore", "LoopbackHub", "Request"]
