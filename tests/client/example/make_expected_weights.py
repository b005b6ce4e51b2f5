#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes data/expected_weights.json: blocks of random bytes in each weight format, and what the gguf
package (ggml's own) makes of them.

    python3 make_expected_weights.py > data/expected_weights.json
"""
import json

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

# Format -> (bytes a block, where its half-precision scales lie).
FORMATS = {Type.F16: (2, [0]), Type.Q4_0: (18, [0]), Type.Q4_1: (20, [0, 2]), Type.Q8_0: (34, [0]),
           Type.Q4_K: (144, [0, 2]), Type.Q6_K: (210, [208])}


def main():
    random = np.random.default_rng(20260101)
    cases = []
    for kind, (block_bytes, scales) in FORMATS.items():
        blocks = random.integers(0, 256, (3, block_bytes), dtype=np.uint8)
        for at in scales:
            halves = random.uniform(-0.1, 0.1, 3).astype(np.float16)
            blocks[:, at:at + 2] = halves.view(np.uint8).reshape(3, 2)
        values = quants.dequantize(blocks.reshape(1, -1), kind)[0].astype(np.float32)
        cases.append({"number": int(kind), "name": kind.name, "bytes": blocks.tobytes().hex(),
                      "values": [float(f"{v:.9g}") for v in values]})
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
