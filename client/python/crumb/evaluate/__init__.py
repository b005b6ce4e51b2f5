# SPDX-License-Identifier: Apache-2.0
"""What two bits cost a model: perplexity, divergence from bfloat16, and retrieval.

    python -m crumb.evaluate --model FOLDER --profile profile.safetensors --text FILES

Needs the extra `models`: pip install 'crumb[models]'.
"""
from crumb.evaluate.retrieval import passkey
from crumb.evaluate.texts import Score, evaluate
from crumb.evaluate.two_bit import TwoBitAttention, rounded_attention

__all__ = ["Score", "TwoBitAttention", "evaluate", "passkey", "rounded_attention"]
