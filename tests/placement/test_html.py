"""The page of a report is complete, safe, self-contained, and legible in a browser."""

import html.parser
import re
import shutil
import subprocess
import zlib

import pytest
import tensorflow as tf

from tfdist_ext.placement import explain

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def report():
    with tf.device("CPU:1"):
        table = tf.Variable(tf.ones([512, 256]), name="<script>alert(1)</script>")

    def towers(x):
        with tf.device("CPU:0"):
            a = tf.nn.relu(tf.matmul(x, tf.ones([512, 256])))
        with tf.device("CPU:1"):
            b = tf.nn.relu(tf.matmul(x, table))
        with tf.device("CPU:9"):
            return tf.concat([a, b], axis=1)

    return explain(towers, tf.ones([64, 512]))


class Reader(html.parser.HTMLParser):
    """Collects tags, attributes and text, and checks that every tag is closed."""

    def __init__(self):
        super().__init__()
        self.tags, self.open, self.texts, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def read(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    return reader


def test_the_page_has_every_part(tmp_path):
    made = report()
    made.to_html(tmp_path / "placement.html")
    reader = read(tmp_path / "placement.html")
    assert not reader.open
    titles = [text for text in reader.texts if text]
    for title in ("towers", "Devices", "Predicted schedule", "What crosses", "Not honoured", "Operations"):
        assert title in titles
    # A bar for every operation that takes time.
    took = [
        row.name for row in made.operations if made.schedule.finish[row.name] > made.schedule.start[row.name]
    ]
    assert len(took) > 4 and reader.tags.count("rect") == len(took)
    # A row for each device, tensor that crosses, and operation, and three of headings.
    assert reader.tags.count("tr") == len(made.devices) + len(made.transfers) + len(made.operations) + 3


def test_names_cannot_become_markup(tmp_path):
    report().to_html(tmp_path / "placement.html")
    text = (tmp_path / "placement.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "alert(1)" not in text or "&lt;" in text


def test_the_page_needs_no_network_and_suits_dark_and_light(tmp_path):
    report().to_html(tmp_path / "placement.html")
    text = (tmp_path / "placement.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|<link|<img", text)
    assert "color-scheme: light dark" in text
    used = [
        value for _, name, value in read(tmp_path / "placement.html").attributes if name in ("src", "href")
    ]
    assert used == []


def pixels(path):
    """Reads the rows of an RGB or RGBA screenshot; enough of PNG for that."""
    data, position, packed = path.read_bytes(), 8, b""
    while position < len(data):
        size, kind = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        body = data[position + 8 : position + 8 + size]
        if kind == b"IHDR":
            width, height, channels = (
                int.from_bytes(body[:4], "big"), int.from_bytes(body[4:8], "big"), {2: 3, 6: 4}[body[9]],
            )  # fmt: skip
        elif kind == b"IDAT":
            packed += body
        position += 12 + size
    raw, stride = zlib.decompress(packed), width * channels
    before, rows = bytearray(stride), []
    for number in range(height):
        kind = raw[number * (stride + 1)]
        line = bytearray(raw[number * (stride + 1) + 1 : (number + 1) * (stride + 1)])
        for i in range(stride):
            left = line[i - channels] if i >= channels else 0
            corner = before[i - channels] if i >= channels else 0
            line[i] = (line[i] + _predicted(kind, left, before[i], corner)) & 255
        rows.append([tuple(line[i : i + 3]) for i in range(0, stride, channels)])
        before = line
    return rows


def _predicted(kind, left, above, corner):
    if kind == 4:
        distances = [abs(above - corner), abs(left - corner), abs(left + above - 2 * corner)]
        return (left, above, corner)[distances.index(min(distances))]
    return (0, left, above, (left + above) // 2)[kind]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_it(tmp_path, dark):
    report().to_html(tmp_path / "placement.html")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,700", *(["--force-dark-mode"] * dark),
        *(["--blink-settings=preferredColorScheme=0"] * dark),
        f"--screenshot={tmp_path / 'page.png'}", f"file://{tmp_path / 'placement.html'}",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    rows = pixels(tmp_path / "page.png")
    counts = {}
    for row in rows:
        for color in row:
            counts[color] = counts.get(color, 0) + 1
    background = max(counts, key=counts.get)
    # The background is most of the page, bars of both colours are there, and text stands out from the background.
    assert counts[background] > 0.6 * sum(counts.values())
    assert (sum(background) < 3 * 64) == dark
    assert counts.get((0x3B, 0x82, 0xC4), 0) > 100 and counts.get((0xD9, 0x82, 0x2B), 0) > 100
    farthest = max(sum(abs(a - b) for a, b in zip(color, background, strict=True)) for color in counts)
    assert farthest > 3 * 150
    # Nothing runs out of the page on the right.
    assert all(color == background for row in rows for color in row[-8:])
