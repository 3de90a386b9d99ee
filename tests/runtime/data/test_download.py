from __future__ import annotations

import contextlib
import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from runtime.data.catalogue import Publication
from runtime.data.errors import DataError
from runtime.data.open import open_source
from runtime.preparing import download
from runtime.preparing.download import extract, get, publication

# Small archives in the publishers' formats, served from this machine; every row is made up here.


class Site:
    """A web server with a few files; ``cut`` bytes are missing at the end of every answer."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.cut = 0
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                body = site.files.get(self.path)
                if body is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) - site.cut])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join(timeout=10)
    made.server.server_close()


def tar_gz(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def zipped(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as bundle:
        for name, text in files.items():
            bundle.writestr(name, text)
    return out.getvalue()


def kuairand_files() -> dict[str, str]:
    head = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,long_view,play_time_ms,"
    head += "duration_ms,tab\n"
    user_names = (
        "user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,"
        "follow_user_num,follow_user_num_range,fans_user_num_range,friend_user_num_range,"
        "register_days_range," + ",".join(f"onehot_feat{n}" for n in range(18)) + "\n"
    )
    flags = ",".join(["1"] * 17)
    base = "KuaiRand-Pure/data/"
    return {
        base + "log_standard_4_08_to_4_21_pure.csv": head
        + "1,9,20220409,2312,1649500000900,1,0,1,99,12000,1\n"
        + "1,9,20220409,2312,1649500000900,1,0,1,99,12000,1\n"
        + "2,8,20220408,7,1649400000000,0,0,0,5,8000,0\n",
        base + "log_standard_4_22_to_5_08_pure.csv": head
        + "2,9,20220505,1830,1651700000000,1,0,1,30000,12000,4\n"
        + "1,8,20220505,1831,1651700060000,0,0,0,10,8000,4\n",
        base + "log_random_4_22_to_5_08_pure.csv": head,
        base + "user_features_pure.csv": user_names
        + f'1,full_active,0,-124,0,3,"(0,10]",0,0,730+,{flags},\n'
        + f'2,high_active,0,1,1,30,"(10,50]","[1,10)",0,730+,{flags},1.0\n',
        base + "video_features_basic_pure.csv": "video_id,author_id,video_type,upload_dt,"
        "upload_type,visible_status,video_duration,server_width,server_height,music_id,"
        "music_type,tag\n"
        '9,77,NORMAL,2022-04-09,Web,1,12000.0,720,1280,5,9.0,"12,65"\n'
        "8,78,NORMAL,2022-04-08,Web,1,8000.0,720.0,1280.0,,,\n",
    }


def offered(site: Site, name: str, body: bytes) -> Publication:
    original = publication(name)
    path = "/" + original.url.rpartition("/")[2]
    site.files[path] = body
    return replace(original, url=site.url + path)


def test_kuairand_arrives_in_the_layout_of_the_catalogue(site, tmp_path):
    path = get(offered(site, "kuairand-pure", tar_gz(kuairand_files())), tmp_path)
    rows = pq.read_table(path).to_pylist()
    assert [r["user"] for r in rows] == [2, 1, 2, 1], "in time order, the repeated row once"
    assert [r["hour"] for r in rows] == [0, 23, 18, 18]
    assert [r["frame"] for r in rows] == ["720x1280"] * 4
    assert [r["tag"] for r in rows] == [None, "12,65", "12,65", None]
    assert [r["music"] for r in rows] == [0, 5, 5, 0]
    assert [r["music_type"] for r in rows] == [-1, 9, 9, -1]
    assert [r["onehot_feat17"] for r in rows] == [1, -1, 1, -1]
    source = open_source("kuairand-pure", data_dir=tmp_path)
    assert len(source.layout.fields) == 39
    (test,) = source.chunks("test")
    assert test.labels.tolist() == [[1, 1], [0, 0]]
    assert test.offsets is not None, "two tags"
    assert sum(b.size for b in source.chunks("train")) == 2


def test_the_14_days_are_cut_from_the_whole_log_and_compared_with_those_of_the_results(
    site, tmp_path, capsys
):
    """Another table than that of the stored results is said to be one, on the screen, too."""
    files = kuairand_files()
    late = next(name for name in files if "log_standard_4_22" in name)
    files[late] += "1,9,20220424,2359,1650000000000,1,0,1,99,12000,1\n"  # a day too early
    wanted = offered(site, "kuairand-pure-14d", tar_gz(files))
    path = get(wanted, tmp_path)
    table = pq.read_table(path)
    assert table["date"].to_pylist() == [20220505, 20220505]
    said = (path.parent / "TERMS.txt").read_text()
    assert "2 rows, whose values are not those of the stored results" in said

    # Had they been the values of the results, it would say so.
    same = replace(wanted, values_sha256=download.values_sha256(table))
    path.unlink()
    assert (
        "2 rows, whose values are those of"
        in (get(same, tmp_path).parent / "TERMS.txt").read_text()
    )


def nothing_left(folder: Path) -> bool:
    return [p for p in folder.rglob("*") if p.is_file()] == []


def test_a_broken_connection_leaves_nothing_and_a_second_try_begins_anew(site, tmp_path):
    body = tar_gz(kuairand_files())
    wanted = offered(site, "kuairand-pure", body)
    for site.cut in (10, len(body) // 2):
        with pytest.raises(DataError, match=rf"ended after \d+ of {len(body)} bytes\n  try again"):
            get(wanted, tmp_path)
        assert nothing_left(tmp_path)
    site.cut = 0
    path = get(wanted, tmp_path)
    assert len(pq.read_table(path)) == 4
    assert get(wanted, tmp_path) == path and len(site.asked) == 3, "there it asks nobody"
    assert hashlib.sha256(body).hexdigest() in (path.parent / "TERMS.txt").read_text()
    assert not list(tmp_path.rglob("*unfinished*"))


def test_an_archive_with_another_checksum_than_the_publications_is_refused_unpacked(site, tmp_path):
    archive = tar_gz(kuairand_files())  # once: an archive has the time of its making
    wanted = replace(offered(site, "kuairand-pure", archive), sha256="0" * 64)
    with pytest.raises(DataError, match=f"but {'0' * 64} was published"):
        get(wanted, tmp_path)
    assert nothing_left(tmp_path)
    known = replace(wanted, sha256=hashlib.sha256(archive).hexdigest())
    assert get(known, tmp_path).is_file()


@pytest.mark.parametrize("place", [30, 60, 100, 140, 200])
@pytest.mark.parametrize("pack", [tar_gz, zipped])
def test_an_archive_with_damaged_bytes_is_said_to_be_damaged(tmp_path, pack, place):
    body = bytearray(pack({"a.csv": "".join(map(str, range(3000))), "b.csv": "y" * 99}))
    body[place : place + 6] = bytes(b ^ 0xFF for b in body[place : place + 6])
    (tmp_path / "x.archive").write_bytes(bytes(body))
    with pytest.raises(DataError, match=r"x\.archive (is no archive or is damaged|holds no)"):
        extract(tmp_path / "x.archive", ("a.csv", "b.csv"), tmp_path)


def test_an_answer_that_is_no_http_is_an_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0 hello\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x.tar.gz"
        with pytest.raises(DataError, match="cannot reach"):
            get(replace(publication("kuairand-pure"), url=url), tmp_path)
        thread.join(timeout=10)
    assert nothing_left(tmp_path)


def test_without_a_network_the_error_says_so(site, tmp_path):
    wanted = replace(publication("kuairand-pure"), url="http://127.0.0.1:9/x.tar.gz")
    with pytest.raises(DataError, match=r"cannot reach .*\n  is there a network\?"):
        get(wanted, tmp_path)
    gone = replace(wanted, url=site.url + "/gone.tar")
    with pytest.raises(DataError, match="answered 404"):
        get(gone, tmp_path)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>please log in</html>", "no archive or is damaged"),
        (tar_gz({"a/a.csv": "x" * 5000})[:40], "no archive or is damaged"),
        (zipped({"a.csv": ""}), "holds no log_standard"),
    ],
    ids=["a page", "cut short", "another member"],
)
def test_a_wrong_archive_is_an_error(site, tmp_path, body, message):
    with pytest.raises(DataError, match=message):
        get(offered(site, "kuairand-pure", body), tmp_path)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("pack", [tar_gz, zipped])
def test_no_member_is_written_outside_the_folder(tmp_path, pack):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "x.archive").write_bytes(
        pack({"../../a.csv": "safe", "/tmp/other": "no", "../evil": "no"})
    )
    extract(inner / "x.archive", ("a.csv",), inner)
    assert (inner / "a.csv").read_text() == "safe"
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "a.csv",
        "x.archive",
    ]


def test_an_archive_that_unpacks_for_ever_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LARGEST_MEMBER_BYTES", 1000)
    (tmp_path / "x.zip").write_bytes(zipped({"a.csv": "0" * 2000}))
    with pytest.raises(DataError, match="more than 1000 bytes"):
        extract(tmp_path / "x.zip", ("a.csv",), tmp_path)


@pytest.fixture
def endless() -> Iterator[Callable[[float], str]]:
    """A server that never ends its answer: a block each so many seconds; gives its address."""
    door, over = socket.create_server(("127.0.0.1", 0)), threading.Event()
    threads: list[threading.Thread] = []

    def answer(every_s: float) -> None:
        peer, _ = door.accept()
        with peer, contextlib.suppress(OSError):
            peer.recv(4096)
            peer.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            while not over.wait(every_s):
                peer.sendall(bytes(2 if every_s else 1 << 16))

    def started(every_s: float) -> str:
        threads.append(threading.Thread(target=answer, args=(every_s,)))
        threads[-1].start()
        return f"http://127.0.0.1:{door.getsockname()[1]}/x.tar"

    yield started
    over.set()
    door.close()
    for thread in threads:
        thread.join(timeout=10)


@pytest.mark.parametrize(
    ("every_s", "limit", "value", "message"),
    [
        (0.0, "LARGEST_DOWNLOAD_BYTES", 1 << 20, "bytes or more, an archive has at most 1,048,576"),
        (0.05, "LONGEST_S", 0.1, r"sent \d+ bytes in 0 s, a download takes at most 0 s"),
    ],
)
def test_a_download_that_never_ends_is_stopped_by_its_size_or_its_time(
    endless, tmp_path, monkeypatch, every_s, limit, value, message
):
    monkeypatch.setattr(download, limit, value)
    with pytest.raises(DataError, match=message):
        get(replace(publication("kuairand-pure"), url=endless(every_s)), tmp_path)
    assert not list(tmp_path.rglob("*.tar"))


def test_changed_columns_of_the_publisher_are_an_error(site, tmp_path):
    files = {k: v.replace("is_click", "clicked") for k, v in kuairand_files().items()}
    with pytest.raises(DataError, match="not as documented"):
        get(offered(site, "kuairand-pure", tar_gz(files)), tmp_path)


def test_an_unknown_download_names_the_nearest():
    with pytest.raises(DataError, match="did you mean kuairand-pure"):
        get("kuairand-pur")
