"""Pretrain a bidirectional GMA model, or one of the baselines, on masked tokens: what a classifier starts from.

    python scripts/pretrain_masked.py scripts/configs/two_cores_masked.yaml --dataset_name FOLDER --output_dir masked
    python scripts/finetune_classifier.py --model_name_or_path masked --train_file reviews.csv --output_dir classifier

Data, tokenizer, loop, checkpoints and results are those of train_wikitext.py. In the output folder: the best model,
for AutoModelForMaskedLM and for AutoModelForSequenceClassification, with its tokenizer. Its perplexity is that of
masked tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from train_wikitext import Arguments as TextArguments
from train_wikitext import LanguageModelling
from training import start

from modeling_gma import GMAConfig, GMAForMaskedLM


MASK = "<|mask|>"


@dataclass
class Arguments(TextArguments):
    mask_share: float = field(
        default=0.2,
        metadata={"help": "Share of tokens to predict: 8 in 10 are masked, 1 is another token, 1 is left as it is."},
    )

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.mask_share < 1:
            raise ValueError(f"--mask_share must be between 0 and 1, got {self.mask_share}.")

    def config(self, **fields) -> GMAConfig:
        return super().config(**({"is_causal": False} | fields))


class MaskedLanguageModelling(LanguageModelling):
    model_class = GMAForMaskedLM

    def _tokenizer(self, rows):
        tokenizer = super()._tokenizer(rows)
        if tokenizer.mask_token is None:
            tokenizer.add_special_tokens({"mask_token": MASK})
        tokenizer.padding_side = "right"
        return tokenizer

    def inputs(self, batch: dict) -> dict:
        tokens, is_real = batch["input_ids"], batch["labels"] != -100
        # In training the loop has seeded the step; what is validated on is masked alike every time.
        generator = None
        if not torch.is_grad_enabled():
            generator = torch.Generator().manual_seed(int(tokens.sum()))
        chance, kind = (torch.rand(tokens.shape, generator=generator).to(tokens.device) for _ in range(2))
        others = torch.randint(len(self.tokenizer), tokens.shape, generator=generator).to(tokens.device)
        chosen = (chance < self.arguments.mask_share) & is_real
        # At least one, so that there is a loss to take the mean of.
        chosen[0, 0] = True
        inputs = torch.where(chosen & (kind < 0.8), self.tokenizer.mask_token_id, tokens)
        inputs = torch.where(chosen & (kind >= 0.9), others, inputs)
        labels = tokens.masked_fill(~chosen, -100)
        return {"input_ids": inputs, "labels": labels, "attention_mask": is_real.long()}

    def check(self, model) -> str:
        return ""


def main() -> None:
    results = start(MaskedLanguageModelling, Arguments, __doc__)
    if results is not None:
        print(
            f"perplexity of masked tokens {results['validation']['perplexity']:.2f} at step {results['best_step']}; "
            f"{results['tokens_per_second']:,.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
