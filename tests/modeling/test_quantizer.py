"""Codes are packed to the bit, stay within half a step, and are the same for training, evaluation and the cache."""

import pytest
import torch

from cskv_cli.modeling.cskv_latents import BLOCK, Latents
from cskv_cli.modeling.cskv_quantizer import Quantizer, dequantize, pack, packed_bytes, quantize, unpack

BITS = [2, 3, 4, 8]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", range(1, 18))
@pytest.mark.parametrize("bits", BITS)
def test_pack_equals_a_string_of_bits(bits, length):
    codes = torch.randint(0, 2**bits, (3, 2, length), generator=torch.Generator().manual_seed(length))
    packed = pack(codes.to(torch.uint8), bits)
    assert packed.dtype == torch.uint8 and packed.shape[-1] == packed_bytes(length, bits) == -(-length * bits // 8)
    for row, got in zip(codes.reshape(-1, length), packed.reshape(-1, packed.shape[-1]), strict=True):
        number = int("".join(f"{code:0{bits}b}" for code in row.flip(0).tolist()), 2)
        assert bytes(got.tolist()) == number.to_bytes(len(got), "little")
    assert torch.equal(unpack(packed, bits, length), codes.to(torch.uint8))


GROUPS = {
    "random": numbers(64, 32),
    "above zero": numbers(64, 32).abs() + 3,
    "below zero": -numbers(64, 32).abs() * 1e-2 - 50,
    "many sizes": numbers(64, 32) * 10.0 ** torch.linspace(-8, 4, 64)[:, None],
    "one far out": torch.cat([numbers(64, 31), torch.full((64, 1), 300.0)], dim=1),
    "narrow": torch.tensor([[10, 10.3, 10.9, 11]]),
    "constant": torch.tensor([[5.0, 5, 5, 5], [0.1, 0.1, 0.1, 0.1], [-3.3, -3.3, -3.3, -3.3]]),
    "zeros": torch.zeros(1, 4),
    "tiny": numbers(4, 8) * 1e-8,
    "huge": torch.tensor([[-65504.0, 65504, 0, 100], [65504, 65504, 65504, 65504], [-65504, -65504, 0, -65504]]),
    "one": numbers(5, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", GROUPS)
def test_error_is_at_most_half_a_step(name, bits, dtype):
    x = GROUPS[name].to(dtype)
    codes, minimum, step = quantize(x, bits)
    assert minimum.dtype == step.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    assert codes.dtype == torch.uint8 and int(codes.max()) < 2**bits
    number = dequantize(codes, minimum, step, torch.float32).double()
    slack = 1e-6 * x.double().abs().amax(-1, keepdim=True)  # fp32
    assert ((number - x.double()).abs() <= step.double() / 2 + slack).all()
    rounded = dequantize(codes, minimum, step, dtype)
    assert rounded.dtype == dtype and rounded.isfinite().all()
    bound = step.double() / 2 + slack + x.double().abs() * torch.finfo(dtype).eps
    assert ((rounded.double() - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("bits", BITS)
def test_step_is_no_wider_than_it_must_be(bits):
    x = numbers(64, 32)
    _, minimum, step = quantize(x, bits)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    assert (minimum <= low).all() and (minimum - low).abs().max() < 4e-3
    torch.testing.assert_close(step.float(), (high - low) / (2**bits - 1), atol=0, rtol=5e-3)


def test_constant_groups_are_exact():
    for value in (5.0, 0.0, -2.5, 65504.0):
        codes, minimum, step = quantize(torch.full((2, 4), value), 4)
        assert torch.equal(dequantize(codes, minimum, step, torch.float32), torch.full((2, 4), value))


def test_beyond_sixteen_bits_is_clipped():
    x = torch.tensor([[1e6, -1e6, 3e38, -3e38], [1e30, 1, 2, 3]])
    for bits in BITS:
        rounded = dequantize(*quantize(x, bits), torch.float32)
        assert rounded.isfinite().all()
        assert (rounded.diff(dim=-1).sign() * x.diff(dim=-1).sign() >= 0).all()  # in the same order


def test_clip_covers_the_middle_of_the_range():
    x = torch.arange(17.0)[None] - 8
    codes, minimum, step = quantize(x, 2, clip=0.75)
    assert (minimum.item(), step.item()) == (-6, 4)
    assert torch.equal(dequantize(codes, minimum, step, torch.float32).amax(), torch.tensor(6.0))


QUANTIZERS = [
    Quantizer(bits, group, per_channel, clip)
    for bits in BITS
    for group, per_channel, clip in [(4, True, 1.0), (4, False, 1.0), (5, True, 0.9), (3, False, 0.8)]
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_round_trip_is_decode_of_encode(quantizer, dtype):
    latents = numbers(3, 4 * quantizer.group, 7).to(dtype)
    for unread in (0, 5, torch.tensor([0, 2, 11])):
        packed = quantizer.encode(latents, unread)
        assert packed.codes.dtype == torch.uint8
        decoded = quantizer.decode(packed, 7, dtype)
        assert torch.equal(quantizer.round_trip(latents, unread), decoded) and decoded.dtype == dtype


def test_layout_of_groups():
    """Keys share a minimum over the tokens of a group in one channel, values over the channels of one token."""
    latents = numbers(2, 12, 6)
    keys, values = (Quantizer(4, 4, per_channel).encode(latents) for per_channel in (True, False))
    low = torch.stack([part.amin(1) for part in latents.split(4, dim=1)], dim=1)
    torch.testing.assert_close(keys.minimum.squeeze(-1).float(), low, atol=2e-3, rtol=0)
    torch.testing.assert_close(values.minimum.flatten(1).float(), latents.amin(-1), atol=2e-3, rtol=0)
    assert keys.codes.shape == (2, 3, 6, 2) and values.codes.shape == (2, 3, 4, 3)


def test_unread_tokens_do_not_matter():
    quantizer, latents = Quantizer(3, 4, per_channel=True), numbers(2, 12, 6)
    wild = latents.clone()
    wild[0, :2], wild[1, :7] = 1e4, torch.nan
    unread = torch.tensor([2, 7])
    expected, got = (quantizer.round_trip(x, unread) for x in (latents, wild))
    assert torch.equal(got[0, 2:], expected[0, 2:]) and torch.equal(got[1, 7:], expected[1, 7:])
    plain = quantizer.round_trip(latents)
    assert torch.equal(plain[0, 4:], expected[0, 4:]) and torch.equal(plain[1, 8:], expected[1, 8:])


def test_gradient_of_round_trip_is_the_identity():
    latents, weight = numbers(2, 8, 5).requires_grad_(), numbers(2, 8, 5, seed=1)
    (Quantizer(2, 4, per_channel=True).round_trip(latents, 3) * weight).sum().backward()
    assert torch.equal(latents.grad, weight)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("sizes", [[1] * 17, [17], [2, 9, 6], [4, 4, 4, 4, 1]])
def test_codes_are_the_same_however_tokens_come(quantizer, sizes):
    latents, unread = numbers(2, 17, 6), torch.tensor([1, 6])
    store, full = Latents(quantizer), 17 // quantizer.group * quantizer.group
    for part in latents.split(sizes, dim=1):
        store.append(part)
        store.settle(unread)
        assert len(store) - store.quantized_tokens < quantizer.group
    assert len(store) == 17 and store.quantized_tokens == full
    expected = quantizer.encode(latents[:, :full], unread)
    assert all(map(torch.equal, store.packed, expected))
    every = torch.cat([quantizer.round_trip(latents[:, :full], unread), latents[:, full:]], dim=1)
    for length in range(1, 18):
        assert torch.equal(store.first(length), every[:, :length])


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_any_part_of_what_is_packed_can_be_read(quantizer):
    store, weights = Latents(quantizer), numbers(2, 3, 17, seed=1)
    store.append(numbers(2, 17, 6))
    store.settle(torch.tensor([0, 0]))
    count = store.quantized_tokens
    every = store.first(count)
    for stop in range(1, count + 1):
        for start in range(0, stop, quantizer.group):
            assert torch.equal(store.tile(start, stop), every[:, start:stop].mT)
        if not quantizer.per_channel:
            got = store.weighted_sum(weights[..., :stop], 1, tile=quantizer.group)
            torch.testing.assert_close(got, weights[..., :stop] @ every[:, :stop])
            torch.testing.assert_close(store.weighted_sum(weights[..., :stop], 1, tile=64), got)


def test_crop_on_and_off_the_border_of_a_group():
    quantizer, latents = Quantizer(4, 4, per_channel=True), numbers(2, 19, 6)
    store = Latents(quantizer)
    store.append(latents)
    store.settle(torch.tensor([0, 0]))
    before = [part.clone() for part in store.packed]
    store.crop(17)
    assert len(store) == 17 and torch.equal(store.recent, latents[:, 16:17])
    with pytest.raises(ValueError, match=r"to 11 tokens.* Crop to 8\b"):
        store.check_crop(11)
    store.crop(8)
    assert len(store) == store.quantized_tokens == 8
    assert all(torch.equal(part, old[:, :2]) for part, old in zip(store.packed, before, strict=True))
    store.append(latents[:, 8:12])
    store.settle(torch.tensor([0, 0]))
    assert all(torch.equal(part, old[:, :3]) for part, old in zip(store.packed, before, strict=True))


@pytest.mark.parametrize("tokens_last", [False, True])
def test_room_for_tokens_to_come_is_zeros(tokens_last):
    """A step reads it, with weights of zero."""
    store, latents = Latents(tokens_last=tokens_last), numbers(2, 5, 6)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(1).isnan()
        store.append(latents[:, :3])
        store.append(latents[:, 3:])
    finally:
        torch.use_deterministic_algorithms(False)
    every = torch.cat([latents, torch.zeros(2, store.capacity - 5, 6)], dim=1)
    assert store.capacity == BLOCK and torch.equal(store.tile(0, BLOCK), every.mT)
