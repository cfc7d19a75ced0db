"""Damaged and hostile files are one clear error, in bounded time and memory; what is left out is counted."""

import bz2
import collections
import gc
import gzip
import io
import json
import lzma
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import treetrain as tt
from treetrain.core.errors import DataError
from treetrain.logs import chat, files, killable, records
from treetrain.logs.killable import ChildError, Killable
from treetrain.logs.load import load

ROW = b'{"input_ids": [1, 2, 3]}\n'


def ids(path, **options):
    return [row.ids.tolist() for row in load(path, **options).trajectories]


# ---- Which files


def test_a_pipe_a_device_and_an_empty_path_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(DataError, match="a pipe or a device, which cannot be read twice; write it to a file"):
            load(path)
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl: is a folder, a pipe"):
        load(tmp_path)
    for empty in ("", [""]):
        with pytest.raises(DataError, match="the path is empty"):
            load(empty)


def test_a_process_substitution_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(ROW * 20_000)
    command = f"{sys.executable} -m treetrain inspect <(cat rows.jsonl)"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "a pipe or a device, which cannot be read twice" in done.stderr


def test_files_of_a_folder_are_read_whatever_the_case_of_their_endings_and_others_are_counted(tmp_path):
    (tmp_path / "a.JSONL").write_bytes(ROW)
    (tmp_path / "b.jsonl.BZ2").write_bytes(bz2.compress(ROW))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(ROW))
    for name in ("d.csv", "e.pkl", "f"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "h.Jsonl.GZ").write_bytes(gzip.compress(ROW))
    (tmp_path / "i").symlink_to("g")
    (tmp_path / "j.jsonl").write_bytes(b"\n")
    found = load(tmp_path)
    assert len(found.trajectories) == 4
    assert any("4 files are not read, since they have other endings: d.csv, e.pkl, f, ..." in n for n in found.notes)
    assert any("a file has no records" in note and "j.jsonl" in note for note in found.notes)


def test_a_link_to_nothing_in_a_folder_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(ROW)
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"b\.jsonl: there is no such file"):
        load(tmp_path)


def test_the_rows_of_dataset_folders_come_from_files_of_the_folder(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_bytes(ROW)
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    table = pa.table({"input_ids": [[1, 2], [3, 4]]})
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    for state, message in (
        ('{"_data_files": [{"filename": "../other.jsonl"}]}', r"names '\.\./other\.jsonl', which is no file of this"),
        (json.dumps({"_data_files": [{"filename": str(other)}]}), "which is no file of this folder"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', r"gone\.arrow: there is no such file"),
        ('{"_data_files": []}', r"state\.json: `_data_files` names no file"),
        ('{"_data_files": 3}', r"state\.json: `_data_files` is 3, expected a list"),
        ('{"_data_files": [{"file', r"state\.json: broken JSON"),
    ):
        (folder / "state.json").write_text(state)
        with pytest.raises(DataError, match=message):
            load(folder)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    assert ids(folder) == ids(tmp_path)[1:] == [[1, 2], [3, 4]]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../../etc"]}')
    with pytest.raises(DataError, match=r"holds the splits saved; name one of them"):
        load(tmp_path)
    (folder / "state.json").unlink()
    with pytest.raises(DataError, match=r"dataset_dict\.json is there, but no split"):
        load(tmp_path)


# ---- Compressed files and archives


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd", "zip"])
def test_a_bomb_is_refused_with_its_line_before_it_fills_the_memory(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files, "BOMB_BYTES", 1 << 20)
    compress = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
    many = (b'{"a": "' + b"a" * 4000 + b'"}\n') * 64
    for number, content in enumerate((b" " * (1 << 18), b'{"a":[],' + b" " * (1 << 18), many)):
        path = tmp_path / f"bomb{number}"
        if kind == "zip":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for member in range(2):
                    archive.writestr(f"{member}.jsonl", ROW + content * 20)
        elif kind == "zstd":
            path.write_bytes(pa.compress(ROW + content * 40, "zstd", asbytes=True))
        else:
            path.write_bytes(compress[kind](ROW) + compress[kind](content) * 40)
        with pytest.raises(DataError, match=r"bomb\d.* line \d+: .* bytes decompress to more than") as found:
            collections.deque(files.read_records(path), 0)
        assert len(str(found.value)) < 400


@pytest.mark.slow
def test_two_gigabytes_in_two_megabytes_take_little_memory_and_time(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(ROW) + gzip.compress(b'"' + b"0" * (1 << 20)) * 2048)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30,) * 2); import treetrain as tt; "
    command = [sys.executable, "-c", limited + f"tt.load({str(path)!r})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "rows.jsonl.gz line 2: the line has more than 268,435,456 bytes" in done.stderr


def test_a_long_line_and_a_long_document_are_refused_with_their_places(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROW + b"\n" + b'{"input_ids": [' + b"1, " * 40 + b"1]}\n")
    with pytest.raises(DataError, match=r"rows\.jsonl line 3: the line has more than 100 bytes"):
        load(path)
    monkeypatch.setattr(files, "BLANK_LINES", 10)
    for before, line in ((b"", 11), (ROW, 12)):
        path.write_bytes(before + b"\n" * 11 + ROW)
        with pytest.raises(DataError, match=rf"rows\.jsonl line {line}: more than 10 blank lines"):
            load(path)
    monkeypatch.setattr(files, "DOCUMENT_BYTES", 100)
    path.write_bytes(b"[\n" + ROW.strip() + (b",\n" + ROW.strip()) * 5 + b"]")
    with pytest.raises(DataError, match=r"rows\.jsonl line 1: JSON over several lines has more than 100 bytes"):
        load(path)


@pytest.mark.parametrize("kind", ["bzip2", "xz", "gzip"])
@pytest.mark.parametrize("keep", [20, -4])
def test_a_stream_that_breaks_off_is_refused_with_its_line(tmp_path, kind, keep):
    compress = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}[kind]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(compress(ROW * 100)[:keep])
    with pytest.raises(DataError, match=r"rows\.jsonl: breaks off after line \d"):
        load(path)


def archive_of(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_an_archive_are_read_or_counted(tmp_path):
    members = [("a.JSONL", ROW * 2), ("b.json", ROW), ("c/d.ndjson", ROW), ("e.csv", "x"), ("__MACOSX/._b.json", "\0")]
    found = load(archive_of(tmp_path / "rows.zip", [*members, ("b.json", ROW.replace(b"3", b"4"))]))
    assert [row.ids.tolist()[2] for row in found.trajectories] == [3, 3, 3, 3, 4]
    assert any(
        "2 members are not read, since they have other endings: e.csv, __MACOSX/._b.json" in n for n in found.notes
    )
    with pytest.raises(DataError, match=r"no member ends in \.jsonl, .*; the archive holds e\.csv"):
        load(archive_of(tmp_path / "none.zip", [("e.csv", "x")]))
    with pytest.raises(DataError, match=r"bad\.zip member b\.json line 1: broken JSON"):
        load(archive_of(tmp_path / "bad.zip", [("a.json", ROW), ("b.json", b'{"a": }')]))
    nameless = [(zipfile.ZipInfo(""), "x"), ("a.jsonl", ROW)]
    assert len(load(archive_of(tmp_path / "nameless.zip", nameless)).trajectories) == 1
    whole = archive_of(tmp_path / "whole.zip", [("a.jsonl", ROW * 50)]).read_bytes()
    (tmp_path / "torn.zip").write_bytes(whole.replace(b"3]", b"4]"))
    with pytest.raises(DataError, match=r"torn\.zip member a\.jsonl: breaks off after line \d+ \(Bad CRC"):
        load(tmp_path / "torn.zip")


@pytest.mark.parametrize("many", ["{}", "[]", '{"a": 1}'])
@pytest.mark.parametrize("form", ["line", "array", "text"])
def test_a_record_of_more_lists_and_objects_than_memory_holds_is_refused_before_they_are_made(
    tmp_path, monkeypatch, many, form
):
    monkeypatch.setattr(records, "CONTAINERS", 1000)
    whole = '{"input_ids": [1, 2], "note": "' + "[{" * 2000 + '"}'
    large = '{"input_ids": [1, 2], "x": [' + ", ".join([many] * 1000) + "]}"
    text = {"line": "\n".join, "array": lambda rows: "[" + ",\n".join(rows) + "]"}.get(form, lambda rows: rows[0])
    path = tmp_path / "rows.jsonl"
    path.write_text(text([whole, large] if form != "text" else [large.replace(", ", ",\n")]))
    line = r"line \d" if form != "text" else "line 1"
    with pytest.raises(DataError, match=rf"rows\.jsonl {line}.*: .*more than 1,000 lists and objects; write smaller"):
        load(path)
    path.write_text(text([whole] * 20))
    assert len(ids(path)) == (20 if form != "text" else 1)


# ---- Pickles


class Shell:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_pickle_is_refused_by_what_it_is_and_nothing_of_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps(Shell())
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as archive:  # as torch.save writes it
        archive.writestr("batch/data.pkl", content)
    for name, data in (
        ("batch.jsonl", content),
        ("batch.pt", saved.getvalue()),
        ("old.PT", pickle.dumps(Shell(), protocol=0)),
        ("batch.pkl", content),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}: is a pickle, as torch\.save .* docs/data\.md shows how"):
            load(name)
    assert not (tmp_path / "ran").exists()


# ---- Tables


def written(path, table):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_column_or_field_that_is_there_twice_is_refused(tmp_path, name):
    lists = pa.array([[1, 2], [3, 4]])
    twice = pa.Table.from_arrays([lists, lists], ["input_ids", "input_ids"])
    with pytest.raises(DataError, match=rf"{name}: .*the column 'input_ids' is there twice; keep one"):
        load(written(tmp_path / name, twice))
    fields = pa.StructArray.from_arrays([lists, lists], ["a", "a"])
    with pytest.raises(DataError, match="the column 'a' is there twice"):
        load(written(tmp_path / name, pa.table({"input_ids": lists, "more": fields})))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_times_that_python_does_not_have_do_not_keep_a_file_from_being_read(tmp_path, name):
    far = pa.array([2**50, None], pa.int64())
    columns = {"input_ids": pa.array([[1, 2], [3, 4]]), "us": far.view(pa.timestamp("us"))}
    columns |= {"zone": far.view(pa.timestamp("ms", "Mars/Olympus")), "ns": far.view(pa.timestamp("ns", "UTC"))}
    columns |= {"day": pa.array([2**30, None], pa.int32()).view(pa.date32()), "took": far.view(pa.duration("s"))}
    columns["deep"] = pa.array([[{"at": 2**50}], None], pa.list_(pa.struct([("at", pa.timestamp("ms"))])))
    path = written(tmp_path / name, pa.table(columns))
    assert ids(path) == [[1, 2], [3, 4]]
    (_, first), (_, second) = files.read_records(path)
    assert first["us"] == first["zone"] == first["took"] == 2**50 and first["deep"] == [{"at": 2**50}]
    assert first["day"] == 2**30 and second == {"input_ids": [3, 4]}


def test_text_that_is_no_utf8_is_refused_with_file_and_column(tmp_path):
    raw = [pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"a\xff\xfe")]
    bad = pa.Array.from_buffers(pa.string(), 2, [None, *raw])
    table = pa.table({"input_ids": pa.array([[1, 2], [3, 4]]), "id": bad})
    for name in ("rows.arrow", "rows.parquet"):
        with pytest.raises(DataError, match=rf"{name}: cannot be read .*column 1.*Invalid UTF8"):
            load(written(tmp_path / name, table))


def test_offsets_beyond_their_buffer_are_refused_before_they_are_read(tmp_path):
    path = written(tmp_path / "rows.arrow", pa.table({"input_ids": pa.array([[1, 2], [3, 4]])}))
    offsets, beyond = (np.array([0, 2, end], np.int32).tobytes() for end in (4, 10_000_000))
    assert offsets in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(offsets, beyond))
    with pytest.raises(
        DataError, match=r"rows\.arrow: cannot be read as arrow after row 0 .*out of bounds: 10000000 > 4"
    ):
        load(path)


CORRUPT = """
import sys
import threading
import numpy as np
from pathlib import Path
import treetrain as tt
path, counts, drawn = Path(sys.argv[1]), [0, 0], np.random.default_rng(0)
whole = path.read_bytes()
for number in range(int(sys.argv[2])):
    data = bytearray(whole)
    for at in drawn.integers(0, len(data), drawn.integers(1, 4)):
        data[at] ^= 1 << int(drawn.integers(8))
    path.write_bytes(bytes(data))
    try:
        tt.load(path, format="tokens")
        counts[0] += 1
    except tt.DataError as error:
        assert str(path) in str(error) and len(str(error)) < 700, error
        counts[1] += 1
print(*counts)
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.zip", "rows.gz"])
def test_files_with_flipped_bits_are_read_or_refused_and_never_end_the_process(tmp_path, name):
    rows = [{"input_ids": list(range(n)), "group_id": f"g{n}", "reward": n / 2} for n in range(1, 9)]
    path = tmp_path / name
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name == "rows.gz":
        path.write_bytes(gzip.compress(text))
    elif name == "rows.zip":
        archive_of(path, [("a.jsonl", text)])
    else:
        written(path, pa.Table.from_pylist(rows))
    command = [sys.executable, "-c", CORRUPT, str(path), "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    read, refused = map(int, done.stdout.split())
    assert read + refused == 60 and refused > 10


# ---- Values


def test_true_is_no_token_id(write_rows):
    for row in ({"input_ids": [5, True, 1]}, {"input_ids": [0, False]}):
        with pytest.raises(DataError, match=r"line 1: .*ids\[1\] is (True|False), expected a whole number"):
            load(write_rows(row))
    for bare in ([[1, 2], [1, 0, True]], [(1, 2), (1, 0, True)]):
        with pytest.raises(DataError, match="row 1: token id True is no whole number"):
            tt.build_tree(bare)
    assert (
        load(write_rows({"input_ids": [0, 1, 2], "loss_mask": [False, True, True]})).trajectories[0].weights.sum() == 2
    )


# ---- Chat templates

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [LOOPS, "{% for m in messages %}{{ m.content }}" + LOOPS + "{% endfor %}"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_template_that_loops_without_end_is_refused_in_bounded_time(
    bytes_tokenizer, write_rows, tmp_path, monkeypatch, template, elsewhere
):
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.3)
    (tmp_path / "endless.jinja").write_text(template)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    options = {"tokenizer": bytes_tokenizer, "chat_template": str(tmp_path / "endless.jinja")}
    path, begun = write_rows({"messages": turns}), time.monotonic()

    def read():
        with pytest.raises(DataError, match=r"line 1: the chat template takes more than 0\.3 s for 2 messages"):
            load(path, **options)

    if elsewhere:  # in a thread to which no signal comes
        with ThreadPoolExecutor(1) as pool:
            pool.submit(read).result()
    else:
        read()
    assert time.monotonic() - begun < 10


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is limited on Linux only")
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ('{{ "a" * 10000000000 }}', "line 1: the chat template takes more than 1,073,741,824 bytes for 1 messages"),
        *(
            (template, "takes more than 1,073,741,824 bytes")
            for template in (
                '{% set n = messages | length * 99999999999 %}{{ "a" * n }}',
                '{{ "a".ljust(10000000000) }}',
                '{{ "%9999999999d" % 1 }}',
            )
        ),
        (
            "{% set o = namespace(x='ab') %}{% for i in range(99) %}{% set o.x = o.x ~ o.x %}{% endfor %}",
            "takes more than",
        ),
        (
            "{% set o = namespace(n=9) %}{% for i in range(99) %}{% set o.n = o.n * o.n %}{% endfor %}",
            "takes more than",
        ),
    ],
)
def test_a_template_that_makes_endless_text_is_refused_in_bounded_time_and_memory(tmp_path, template, message):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    (tmp_path / "bomb.jinja").write_text(template)
    code = (
        "import resource, sys, treetrain as tt; from treetrain.logs import chat; chat.RENDER_SECONDS = 2; "
        "tokenizer = tt.load_tokenizer('tiny')\n"
        "try: tt.load(sys.argv[1], tokenizer=tokenizer, chat_template=sys.argv[2])\n"
        "except tt.DataError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrlimit(resource.RLIMIT_AS)[0])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "rows.jsonl"), str(tmp_path / "bomb.jinja")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.search(message, done.stdout), done.stdout + done.stderr
    most, limit = map(int, done.stdout.split()[-2:])
    assert most < 3 << 20 and limit == resource.getrlimit(resource.RLIMIT_AS)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is limited on Linux only")
def test_parquet_that_has_run_lengths_without_bound_is_refused(tmp_path, monkeypatch):
    """40 million zeros in one row take 5 kB of file; they would be 1.6 GB of Python numbers."""
    zeros = pa.array(np.zeros(40_000_000, np.int8))
    column = pa.ListArray.from_arrays(pa.array([0, len(zeros)], pa.int32()), zeros)
    path = written(tmp_path / "rows.parquet", pa.table({"input_ids": column}))
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(files, "TABLE_BYTES", 1 << 27)
    with pytest.raises(DataError, match=r"rows\.parquet: the rows after 0 take more than 134,217,728 bytes"):
        load(path)
    monkeypatch.setattr(files, "BOMB_BYTES", 1 << 20)
    pyarrow.parquet.write_table(pa.table({"messages": ["a" * 5_000_000]}), path, compression="zstd")
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as parquet .* bytes decompress to"):
        load(path)


def zeros(rows, count):
    """Rows of so many zeros, whose pages of memory are one."""
    return pa.LargeListArray.from_arrays(pa.array(range(0, rows * count + 1, count), pa.int64()), buffer(rows * count))


def buffer(count):
    return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(np.zeros(count, np.int32))])


def in_batches(path, kind, codec, column, batches):
    options = pa.ipc.IpcWriteOptions(compression=codec)
    table = pa.table({"input_ids": column})
    with getattr(pa.ipc, f"new_{kind}")(str(path), table.schema, options=options) as writer:
        for _ in range(batches):
            writer.write(table)
    return path


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_batches_that_decompress_without_bound_are_refused_together(tmp_path, monkeypatch, kind, codec):
    path = in_batches(tmp_path / "rows.arrow", kind, codec, zeros(2, 1 << 15), 20)
    assert len(load(path).trajectories) == 40
    monkeypatch.setattr(files, "BOMB_BYTES", 1 << 20)
    monkeypatch.setattr(files, "BOMB_RATIO", 20)
    with pytest.raises(DataError, match=r"rows\.arrow: cannot be read as arrow after row \d+ \(.* decompress to more"):
        load(path)


def test_what_many_rows_repeat_counts_for_each(tmp_path, monkeypatch):
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int8()), zeros(1, 1 << 12))
    for name, write in (("rows.arrow", lambda path: in_batches(path, "file", None, same, 1)), ("rows.parquet", None)):
        path = tmp_path / name
        (write or (lambda path: pyarrow.parquet.write_table(pa.table({"input_ids": zeros(400, 1 << 12)}), path)))(path)
        assert path.stat().st_size < 1 << 16 and len(load(path).trajectories) == 400
        with monkeypatch.context() as patched:
            patched.setattr(files, "BOMB_BYTES", 1 << 20)
            patched.setattr(files, "BOMB_RATIO", 1)
            with pytest.raises(DataError, match=rf"{name}: cannot be read .* bytes decompress to more than"):
                load(path)
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([1 << 30], pa.int32()), zeros(1, 4))
    in_batches(tmp_path / "runs.arrow", "file", None, runs, 1)
    with pytest.raises(DataError, match=r"runs\.arrow: cannot be read .*run_end_encoded.* has no bound on its length"):
        load(tmp_path / "runs.arrow")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is limited on Linux only")
@pytest.mark.parametrize(
    "codec", ["file zstd", "file lz4", "stream zstd", "stream lz4", "snappy", "gzip", "zstd", "lz4"]
)
def test_gigabytes_in_one_buffer_are_refused_in_bounded_memory(tmp_path, codec):
    """6 GB in a buffer of Arrow; pages of Parquet have 2 GB at most, and the table is larger than the limit here."""
    kind, _, rest = codec.partition(" ")
    if rest:
        path, limit = in_batches(tmp_path / "rows.arrow", kind, rest, zeros(1, 3 << 29), 1), files.TABLE_BYTES
    else:
        path, limit = tmp_path / "rows.parquet", 1 << 28
        table, options = pa.table({"input_ids": zeros(1, 100_000_000)}), {"use_dictionary": False}
        pyarrow.parquet.write_table(table, path, compression=codec, data_page_size=1 << 30, **options)
    assert path.stat().st_size < 1 << 25
    code = (
        f"import re, sys, treetrain as tt; from treetrain.logs import files; files.TABLE_BYTES = {limit}\n"
        "try: tt.load(sys.argv[1])\n"
        "except tt.DataError as error: print(error)\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=300)
    assert f"{path}: the rows after 0 take more than {limit:,} bytes" in done.stdout, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) < 1 << 20


def test_a_call_that_is_one_instruction_without_end_is_ended_and_the_next_one_served():
    nested, other = [], []
    for _ in range(60):  # comparing them takes 2 ** 60 steps of C code
        nested, other = [nested, nested], [other, other]
    calls = Killable(lambda end: other == nested if end else os.getpid(), 1 << 28)
    first = calls(10, False)
    assert first == calls(10, False) != os.getpid()
    with pytest.raises(TimeoutError):
        calls(0.2, True)
    assert first != calls(10, False) != os.getpid()


def test_a_process_that_dies_or_raises_is_an_error_and_ends_with_its_owner():
    calls = Killable(lambda number: os.kill(os.getpid(), number) if number else 1 / 0, 1 << 28)
    with pytest.raises(ChildError, match="ZeroDivisionError: division by zero"):
        calls(10, 0)
    with pytest.raises(ChildError, match="its process was ended by SIGUSR1"):
        calls(10, signal.SIGUSR1)
    with pytest.raises(ChildError):
        calls(10, 0)
    pid = calls._child._pid
    del calls
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_many_calls_are_made_ahead_and_one_that_fails_ends_its_group_alone():
    made = []

    def call(number):
        if number < 0:
            os.kill(os.getpid(), -number)
        return 12 // number, os.getpid()

    calls = Killable(call, 1 << 28)
    groups = [[(3,), (4,)], [(1,), (0,), (2,)], [], [(6,)], [(-signal.SIGALRM,), (1,)], [(2,)]]
    for answers in calls.map(10, groups):
        made.append([answer if isinstance(answer, Exception) else answer[0] for answer in answers])
        if len(made) == 1:
            assert calls(10, 12)[0] == 1  # the process that owed the others was ended, and they are asked for again
    assert made[0] == [4, 3] and made[2:4] == [[], [2]] and made[5] == [6]
    assert made[1][0] == 12 and isinstance(made[1][1], ChildError) and len(made[1]) == 2
    assert isinstance(made[4][0], TimeoutError) and len(made[4]) == 1


def test_threads_share_a_process():
    calls = Killable(lambda number: number + 1, 1 << 28)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: calls(10, number), range(200))) == list(range(1, 201))


class WaitsInOthers:
    """Something of the main thread that a forked child, which clears that thread's state, would wait for for ever."""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def __del__(self) -> None:
        while os.getpid() != self.owner:
            signal.pause()


def test_a_process_that_does_not_start_is_ended_and_said(monkeypatch):
    monkeypatch.setattr(killable, "START_SECONDS", 0.3)
    calls = Killable(lambda number: number + 1, 1 << 28)
    state = threading.local()
    state.held = WaitsInOthers()
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
        said = pool.submit(pytest.raises, RuntimeError, calls, 10, 1).result()
    said.match(r"a process forked from thread 'reader_0' has not started within 0\.3 s: .* in the main thread")
    assert calls(10, 1) == 2  # which is this one
    del state.held


def test_a_process_collects_no_garbage_of_its_owner():
    def collect() -> int:
        return gc.collect()

    gc.disable()  # or the owner collects it
    try:
        holds = WaitsInOthers()
        holds.itself = holds  # type: ignore[attr-defined]
        del holds
        assert Killable(collect, 1 << 28)(2.0) >= 0
    finally:
        gc.enable()


NESTED = (
    "{% set o = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set o.x = [o.x, o.x] %}{% set o.y = [o.y, o.y] %}"
)
COMPARES = NESTED + "{% endfor %}{{ o.y == o.x }}"
POWER = "{{ 9 ** (9 ** 9) % 2 }}"


@pytest.mark.parametrize("template", [COMPARES, POWER])
def test_a_template_whose_one_operation_never_ends_is_refused_in_bounded_time(
    bytes_tokenizer, write_rows, monkeypatch, template
):
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.3)
    path = write_rows({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    with pytest.raises(DataError, match=r"line 1: the chat template takes more than 0\.3 s"):
        load(path, tokenizer=bytes_tokenizer, chat_template=template)


def test_of_many_conversations_those_that_never_end_are_skipped_by_name(bytes_tokenizer, write_rows, monkeypatch):
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.8)
    ends = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% if m.content == 'loop' %}"
    template = (
        ends + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
    )
    texts = ["a", "loop", "b", "c", "loop", "d"]
    rows = [{"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "x"}]} for one in texts]
    options = {"tokenizer": bytes_tokenizer, "chat_template": template}
    with pytest.raises(DataError, match=r"line 2: the chat template takes more than 0\.8 s for [12] messages"):
        load(write_rows(*rows), view="calls", **options)
    for view in ("calls", "transcript"):
        read = load(write_rows(*rows), view=view, on_error="skip", **options)
        assert len(read.trajectories) == 4
        assert [one.split(": the chat")[0].rpartition(" ")[2] for one in read.skipped] == ["2", "5"]


@pytest.mark.parametrize("depth", [200, 600, 900])
def test_of_many_conversations_the_one_that_is_nested_too_deeply_is_named(bytes_tokenizer, write_rows, depth):
    def row(depth):
        call = {"function": {"name": "f", "arguments": {"x": json.loads("[" * depth + "]" * depth)}}}
        answer = {"role": "assistant", "content": "b", "tool_calls": [call]}
        return {"messages": [{"role": "user", "content": "a"}, answer]}

    path = write_rows(row(1), row(depth), row(2))
    read = load(path, tokenizer=bytes_tokenizer, chat_template="chatml", on_error="skip")
    assert len(read.trajectories) + len(read.skipped) == 3 and all("line 2: " in one for one in read.skipped)
    assert bool(read.skipped) == (depth > 500)


def test_a_tokenizer_that_has_changed_renders_as_it_is_now(bytes_tokenizer):
    question = [{"role": "user", "content": "a"}]
    first = chat.Renderer(bytes_tokenizer, "{{ eos_token }}{{ messages | length }}")
    before, said = bytes_tokenizer.eos_token, first.render(question, None)
    try:
        bytes_tokenizer.eos_token = "<|other|>"
        assert chat.Renderer(bytes_tokenizer, "{{ eos_token }}").render(question, None) == "<|other|>" != said
    finally:
        bytes_tokenizer.eos_token = before
