"""What people do with a model: Trainer and pipelines, from a folder on disk."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from modeling_gma import GMAForCausalLM, GMAForMaskedLM, GMAForSequenceClassification


WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "saw",
    "heard",
    "liked",
    "good",
    "bad",
    "film",
    "was",
    "very",
    "and",
    "it",
    "ran",
]


@pytest.fixture
def tokenizer():
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[EOS]", "[MASK]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        eos_token="[EOS]",
        mask_token="[MASK]",
        unk_token="[UNK]",
        padding_side="left",
    )


@pytest.fixture
def reviews(tokenizer):
    """Sentences of uneven length; the label is whether "good" stands in them."""
    generator = torch.Generator().manual_seed(0)
    neutral = [w for w in WORDS if w not in ("good", "bad")]
    rows = {"text": [], "label": []}
    for i in range(160):
        words = [neutral[j] for j in torch.randint(0, len(neutral), (3 + i % 9,), generator=generator)]
        words.insert(i % len(words), "good" if i % 2 else "bad")
        rows["text"].append(" ".join(words))
        rows["label"].append(i % 2)
    dataset = Dataset.from_dict(rows)
    return dataset.map(lambda batch: tokenizer(batch["text"]), batched=True, remove_columns="text")


def arguments(tmp_path, **changes):
    defaults = {
        "output_dir": str(tmp_path / "trainer"),
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-2,
        "max_steps": 40,
        "weight_decay": 0.1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 0,
        "use_cpu": True,
    }
    return TrainingArguments(**(defaults | changes))


def vocabulary_of(tokenizer, tiny_config, **changes):
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return tiny_config(vocab_size=len(tokenizer), initializer_range=0.02, **ids, **changes)


@pytest.mark.parametrize("model_class", [GMAForCausalLM, GMAForMaskedLM])
def test_trainer_fine_tunes_a_classifier_from_a_pretrained_checkpoint(
    model_class, tokenizer, reviews, tiny_config, tmp_path
):
    is_causal = model_class is GMAForCausalLM
    pretrained = model_class(vocabulary_of(tokenizer, tiny_config, is_causal=is_causal))
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=not is_causal)
    trainer = Trainer(
        pretrained, arguments(tmp_path), train_dataset=reviews.remove_columns("label"), data_collator=collator
    )
    first = trainer.evaluate(reviews.remove_columns("label"))["eval_loss"]
    trainer.train()
    assert trainer.evaluate(reviews.remove_columns("label"))["eval_loss"] < first
    trainer.save_model(str(tmp_path / "pretrained"))

    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "pretrained", num_labels=2)
    assert classifier.config.classifier_pooling == ("last" if is_causal else "mean")
    trainer = Trainer(
        classifier,
        arguments(tmp_path, max_steps=80),
        train_dataset=reviews,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
    )
    trainer.train()
    assert trainer.evaluate(reviews)["eval_accuracy"] > 0.95
    trainer.save_model(str(tmp_path / "classifier"))
    tokenizer.save_pretrained(tmp_path / "classifier")

    classify = pipeline("text-classification", model=str(tmp_path / "classifier"))
    # As in the reviews, where the word is never the last.
    results = classify(["the film was good and very", "it was bad and the dog ran"], batch_size=2)
    assert [r["label"] for r in results] == ["LABEL_1", "LABEL_0"]


def test_trainer_trains_packed(tokenizer, reviews, tiny_config, tmp_path):
    model = GMAForCausalLM(vocabulary_of(tokenizer, tiny_config))
    dataset = reviews.select_columns("input_ids")
    trainer = Trainer(
        model, arguments(tmp_path, max_steps=20), train_dataset=dataset, data_collator=DataCollatorWithFlattening()
    )
    before = trainer.evaluate(dataset)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(dataset)["eval_loss"] < before


def test_trainer_resumes_and_checkpoints_gradients(tokenizer, reviews, tiny_config, tmp_path):
    """Interrupted and resumed, training ends with the same weights as in one go."""

    def train(folder, **changes):
        torch.manual_seed(0)
        model = GMAForSequenceClassification(vocabulary_of(tokenizer, tiny_config))
        options = arguments(folder, max_steps=10, save_strategy="steps", save_steps=5, gradient_checkpointing=True)
        trainer = Trainer(model, options, train_dataset=reviews, data_collator=DataCollatorWithPadding(tokenizer))
        trainer.train(**changes)
        return model, folder / "trainer"

    whole, folder = train(tmp_path)
    resumed, _ = train(tmp_path, resume_from_checkpoint=str(folder / "checkpoint-5"))
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters()):
        torch.testing.assert_close(a, b, msg=name)


def test_trainer_smooths_labels_of_the_next_token(tokenizer, tiny_config, tmp_path):
    """With label smoothing it is `Trainer` that computes the loss, and it has to shift the labels."""
    rows = [{"input_ids": [4 + (i + j) % 16 for j in range(12)]} for i in range(64)]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    model = GMAForCausalLM(vocabulary_of(tokenizer, tiny_config))
    options = arguments(tmp_path, max_steps=60, label_smoothing_factor=0.1)
    Trainer(model, options, train_dataset=Dataset.from_list(rows), data_collator=collator).train()
    tokens = torch.tensor([row["input_ids"] for row in rows[:8]])
    predicted = model.eval()(tokens).logits[:, :-1].argmax(-1)
    assert (predicted == tokens[:, 1:]).float().mean() > 0.9


def test_accumulation_does_not_change_a_classifiers_loss(tokenizer, reviews, tiny_config, tmp_path):
    losses = []
    for batch, steps in ((16, 1), (4, 4)):
        torch.manual_seed(0)
        model = GMAForSequenceClassification(vocabulary_of(tokenizer, tiny_config))
        options = arguments(
            tmp_path,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=1,
            logging_steps=1,
        )
        trainer = Trainer(model, options, train_dataset=reviews, data_collator=DataCollatorWithPadding(tokenizer))
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert abs(losses[0] - losses[1]) < 1e-2


def test_text_generation_pipeline(tokenizer, tiny_config, tmp_path):
    GMAForCausalLM(vocabulary_of(tokenizer, tiny_config)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generate = pipeline("text-generation", model=str(tmp_path))
    prompts = ["the cat", "a dog heard it and ran", "bird"]
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = [generate(prompt, **options)[0]["generated_text"] for prompt in prompts]
    together = [r[0]["generated_text"] for r in generate(prompts, batch_size=3, **options)]
    assert alone == together
    assert all(text.startswith(prompt) for text, prompt in zip(alone, prompts))
    model, again = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    inputs = again(prompts, return_tensors="pt", padding=True)
    new_tokens = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    for text, new, prompt in zip(alone, again.batch_decode(new_tokens, skip_special_tokens=True), prompts):
        assert text.removeprefix(prompt).split() == new.split()


def test_fill_mask_pipeline(tokenizer, tiny_config, tmp_path):
    GMAForMaskedLM(vocabulary_of(tokenizer, tiny_config, is_causal=False)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path)) is GMAForMaskedLM
    results = pipeline("fill-mask", model=str(tmp_path))("the [MASK] was good", top_k=3)
    assert len(results) == 3 and all(0 < r["score"] < 1 for r in results)
