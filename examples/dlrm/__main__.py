"""Train the DLRM: ``torchrun --nproc-per-node 2 -m examples.dlrm``."""

from __future__ import annotations

from examples.dlrm.train import main

if __name__ == "__main__":
    main()
