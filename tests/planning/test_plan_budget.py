import numpy as np
import pytest

from treetrain.planning.budget import Bytes, parse_budget


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None),
        (1, 1),
        (np.int32(4096), 4096),
        ("4096", 4096),
        (" 17 ", 17),
        ("8GiB", Bytes(8 * 2**30)),
        ("512MiB", Bytes(512 * 2**20)),
        ("1.5GB", Bytes(1_500_000_000)),
        ("900 MB", Bytes(900_000_000)),
        ("2e9B", Bytes(2_000_000_000)),
        ("2E+9 b", Bytes(2_000_000_000)),
        ("3 kib", Bytes(3072)),
        ("3 KB", Bytes(3000)),
        (".5tb", Bytes(500_000_000_000)),
        ("1TiB", Bytes(2**40)),
        (Bytes(7), Bytes(7)),
    ],
    ids=str,
)
def test_a_budget_is_tokens_or_bytes_with_a_unit(given, meant):
    assert parse_budget(given) == meant
    assert type(parse_budget(given)) is type(meant)


@pytest.mark.parametrize(
    "given",
    [
        True,
        0,
        -3,
        1.5,
        np.float64(2),
        "",
        "GiB",
        "1.5",
        "-8GiB",
        "8 GiBs",
        "8XB",
        "0B",
        "0",
        "0.1B",
        [4],
        Bytes(0),
        "1e999B",
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_what_was_given_and_what_is_accepted(given):
    with pytest.raises(ValueError, match="GiB") as caught:
        parse_budget(given)
    assert repr(given) in str(caught.value)
    assert "tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (8 * 2**30, "8.0 GiB"), (5 * 2**50, "5120.0 TiB")],
)
def test_bytes_print_in_the_largest_unit_that_leaves_a_whole(count, text):
    assert str(Bytes(count)) == text
