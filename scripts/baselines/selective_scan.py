"""Mamba's selective scan in PyTorch, with a backward of its own, for where mamba-ssm's kernels do not run."""

from __future__ import annotations

import math

import torch


# Numbers in the states of a stretch of tokens, which are made and used up while they are in the processor's cache.
STRETCH = 2**18


def selective_scan(
    inputs: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor, write: torch.Tensor, read: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """state_t = exp(steps_t rates) state_{t-1} + steps_t inputs_t write_t, output_t = <state_t, read_t>.

    Args:
        inputs: (B, N, D), and `steps` likewise.
        rates: (D, S), negative.
        write: (B, N, S), and `read` likewise.

    Returns:
        The outputs (B, N, D) and the state after the last token (B, D, S), in float32 or wider.
    """
    wide = torch.promote_types(inputs.dtype, torch.float32)
    inputs, steps, write, read = (x.to(wide).transpose(0, 1).contiguous() for x in (inputs, steps, write, read))
    outputs, state = _Scan.apply(inputs, steps, rates.to(wide).mT.contiguous(), write, read)
    return outputs.transpose(0, 1), state.mT


class _Scan(torch.autograd.Function):
    """Keeps the state before every stretch; backward makes the states within it again.

    Tokens come first here, and states are (S, D): sums over S, which is small, then run along whole rows.
    """

    @staticmethod
    def forward(ctx, inputs, steps, rates, write, read):
        stretches, scratch = _stretches(inputs, rates, 2)
        written = steps * inputs
        outputs = torch.empty_like(inputs)
        befores = inputs.new_zeros(len(stretches) + 1, inputs.shape[1], *rates.shape)
        for number, part in enumerate(stretches):
            _, states = _run(befores[number], steps[part], rates, written[part], write[part], scratch)
            torch.matmul(read[part].unsqueeze(-2), states, out=outputs[part].unsqueeze(-2))
            befores[number + 1] = states[-1]
        ctx.save_for_backward(inputs, steps, rates, write, read, befores)
        return outputs, befores[-1].clone()

    @staticmethod
    def backward(ctx, grad_outputs, grad_state):
        inputs, steps, rates, write, read, befores = ctx.saved_tensors
        stretches, scratch = _stretches(inputs, rates, 4)
        written, grad_outputs = steps * inputs, grad_outputs.contiguous()
        grad_written, grad_steps, grad_rates = torch.empty_like(inputs), torch.empty_like(steps), rates.new_zeros(())
        grad_write, grad_read = torch.empty_like(write), torch.empty_like(read)
        for number, part in reversed(list(enumerate(stretches))):
            decays, states = _run(befores[number], steps[part], rates, written[part], write[part], scratch)
            grad, product = (x[: len(states)] for x in scratch[2:])
            torch.mul(grad_outputs[part].unsqueeze(-2), read[part].unsqueeze(-1), out=grad)
            grads, kept = grad.unbind(), decays.unbind()
            grads[-1].add_(grad_state)
            for token in range(len(grads) - 1, 0, -1):
                grads[token - 1].addcmul_(kept[token], grads[token])
            grad_state = kept[0] * grads[0]
            torch.matmul(grad_outputs[part].unsqueeze(-2), states.mT, out=grad_read[part].unsqueeze(-2))
            torch.matmul(written[part].unsqueeze(-2), grad.mT, out=grad_write[part].unsqueeze(-2))
            torch.matmul(write[part].unsqueeze(-2), grad, out=grad_written[part].unsqueeze(-2))
            # From here on the gradient of steps times rates, the exponent of the decays.
            grad.mul_(decays)
            grad[0].mul_(befores[number])
            grad[1:].mul_(states[:-1])
            torch.sum(torch.mul(grad, rates, out=product), -2, out=grad_steps[part])
            grad_rates = grad_rates + grad.mul_(steps[part].unsqueeze(-2)).sum((0, 1))
        return grad_written * steps, grad_steps.addcmul_(grad_written, inputs), grad_rates, grad_write, grad_read


def _stretches(inputs: torch.Tensor, rates: torch.Tensor, buffers: int) -> tuple[list[slice], list[torch.Tensor]]:
    tokens, rest = len(inputs), (inputs.shape[1], *rates.shape)
    length = max(STRETCH // max(rest[0] * rates.numel(), 1), 1)
    scratch = [inputs.new_empty(min(length, tokens), *rest) for _ in range(buffers)]
    return [slice(first, min(first + length, tokens)) for first in range(0, tokens, length)], scratch


def _run(before, steps, rates, written, write, scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays and states (n, B, S, D) of a stretch of n tokens."""
    decays, states = (x[: len(steps)] for x in scratch[:2])
    # Powers of two are several times as fast as those of e.
    torch.mul(steps.unsqueeze(-2), rates / math.log(2), out=decays).exp2_()
    torch.mul(written.unsqueeze(-2), write.unsqueeze(-1), out=states)
    for decay, state in zip(decays.unbind(), states.unbind()):
        before = state.addcmul_(decay, before)
    return decays, states
