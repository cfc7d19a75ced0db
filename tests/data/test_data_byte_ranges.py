"""Every line belongs to exactly one process, and is found again by where it begins."""

from hypothesis import given, settings
from hypothesis import strategies as st

from treetrain.data.byte_ranges import count_lines, line_at, lines_of, ranges_of

texts = st.lists(
    st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"x").replace(b"\r", b"y").replace(b"\xef", b"z")),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(files=st.lists(st.tuples(texts, st.booleans()), min_size=1, max_size=3), ranks=st.integers(1, 5))
def test_ranges_have_every_line_of_all_files_once_and_in_order(files, ranks, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("files")
    paths, expected = [], []
    for number, (lines, ended) in enumerate(files):
        text = b"\n".join(lines) + (b"\n" if ended and lines else b"")
        path = folder / f"{number}"
        path.write_bytes(text)
        paths.append(str(path))
        expected.append(text.splitlines(keepends=True))
    sizes = [sum(map(len, lines)) for lines in expected]
    found: list[list[bytes]] = [[] for _ in files]
    for rank in range(ranks):
        for part in ranges_of(sizes, rank, ranks):
            lines = list(lines_of(paths[part.file], part))
            assert count_lines(paths[part.file], part) == len(lines)
            assert all(line_at(paths[part.file], offset) == line for offset, line in lines)
            found[part.file] += [line for _, line in lines]
    assert found == expected


def test_shares_are_of_about_equal_bytes() -> None:
    for ranks in (1, 3, 8):
        shares = [
            sum(part.end - part.begin for part in ranges_of([700, 20, 280], rank, ranks)) for rank in range(ranks)
        ]
        assert sum(shares) == 1000 and max(shares) - min(shares) <= 1


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"\xef\xbb\xbf{}\n[]\n")
    [whole] = ranges_of([path.stat().st_size], 0, 1)
    assert list(lines_of(str(path), whole)) == [(0, b"{}\n"), (6, b"[]\n")]
    assert line_at(str(path), 0) == b"{}\n" and line_at(str(path), 6) == b"[]\n"
