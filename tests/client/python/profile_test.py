# SPDX-License-Identifier: Apache-2.0
"""crumb.profile: files in, files out, and what it refuses."""
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from conftest import KEY_DIM, KV_HEADS, LAYERS, QUERY_HEADS, VALUE_DIM, by_token, new_collector, text
from crumb import profile as profiles


def test_a_written_profile_is_read_as_it_was(profile, tmp_path):
    path = tmp_path / "profile.safetensors"
    profile.write(path)
    again = profiles.load(path)
    assert again.file == profile.file == path.read_bytes()
    assert again.id == profile.id == hashlib.sha256(profile.file).hexdigest()
    assert (again.codec, again.model) == (profile.codec, "a model of random rows")
    assert (again.num_layers, again.num_kv_heads, again.key_dim, again.value_dim) == (LAYERS, KV_HEADS, KEY_DIM, VALUE_DIM)
    assert (again.sink_tokens, again.recent_tokens) == (64, 256)


def test_a_profile_is_held_against_a_model(aware):
    profiles.check(aware, num_layers=LAYERS, num_kv_heads=KV_HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM)
    with pytest.raises(ValueError, match="num_layers is 2 where the model has 30, value_dim is 32 where the model has 64"):
        profiles.check(aware, num_layers=30, num_kv_heads=KV_HEADS, key_dim=KEY_DIM, value_dim=64)


@pytest.mark.parametrize("options, flags", [
    ({}, []),
    (dict(codec="oscar-int2", rotation="layer", key_clip=0.9, value_clip=0), "--codec oscar-int2 --rotation per-layer --key-clip 0.9 --value-clip 0"),
    (dict(codec="oscar-int2-aware", key_rotation="hadamard", shift_keys=False, damping=0.2),
     "--codec oscar-int2-aware --key-rotation hadamard --no-shift --damping 0.2"),
    (dict(codec="oscar-int2-lm"), "--codec oscar-int2-lm"),
    (dict(value_levels="deviation"), "--value-levels deviation"),
    (dict(key_ranges="chosen", key_margin=0), "--key-ranges chosen --key-margin 0"),
    (dict(value_rotation="hadamard", choose=False, sink_tokens=128, recent_tokens=512),
     "--value-rotation hadamard --no-choose --sink 128 --recent 512"),
    (dict(key_margin=0.05, value_margin=0, threads=1), "--key-margin 0.05 --value-margin 0"),
])
def test_each_option_of_a_fit_is_that_of_the_program(statistics, tmp_path, options, flags):
    program = shutil.which("crumb-calibrate", path=sysconfig.get_path("scripts"))
    if program is None:
        pytest.skip("crumb-calibrate is not beside this Python: install the package's wheel")
    source, out = tmp_path / "stats.safetensors", tmp_path / "profile.safetensors"
    statistics.write(source)
    flags = flags.split() if flags else []
    subprocess.run([program, "fit", str(source), "--out", str(out), *flags], check=True, capture_output=True)
    assert profiles.fit(statistics, **options)[0].file == out.read_bytes()


@pytest.mark.parametrize("options, message", [
    (dict(codec="int2"), "codec 'int2' is not known"),
    (dict(key_ranges="wide"), "key_ranges 'wide' is not known"),
    (dict(key_ranges="chosen", choose=False), "key_ranges are to be chosen"),
    (dict(value_levels="none"), "value_levels 'none' is not known"),
    (dict(key_rotation="random"), "rotation 'random' is not known"),
    (dict(rotation="layer"), "heads cannot share a key rotation"),
    (dict(value_clip=1.5), "value_clip is 1.5"),
    (dict(damping=0), "damping is 0"),
    (dict(key_margin=1), "key_choice_margin is 1"),
])
def test_options_out_of_range_are_refused_by_name(statistics, options, message):
    with pytest.raises(ValueError, match=message):
        profiles.fit(statistics, **options)


def test_files_that_are_no_profile_are_refused(aware, tmp_path):
    path = tmp_path / "bad"
    with pytest.raises(FileNotFoundError, match=str(path)):
        profiles.load(path)
    path.write_bytes(aware.file[:-5])
    with pytest.raises(ValueError, match=str(path)):
        profiles.load(path)
    with pytest.raises(ValueError):
        profiles.parse(b"nothing")


def test_statistics_survive_their_file(statistics, tmp_path):
    path = tmp_path / "stats.safetensors"
    statistics.write(path)
    again = profiles.load_statistics(path)
    for name in ("query_moment", "query_mean", "value_covariance", "key_mean", "key_moment"):
        assert np.array_equal(getattr(again, name), getattr(statistics, name)), name
    assert (again.num_texts, again.num_tokens, again.num_query_heads) == (1, 512, QUERY_HEADS)


def test_statistics_with_nan_are_refused_by_tensor(statistics, tmp_path):
    path = tmp_path / "stats.safetensors"
    statistics.write(path)
    file = bytearray(path.read_bytes())
    file[-8:] = np.array([np.nan]).tobytes()
    path.write_bytes(file)
    with pytest.raises(ValueError, match="tensor '.*nan|NaN|infinit|finite"):
        profiles.load_statistics(path)


def test_rows_with_nan_leave_the_statistics_alone():
    collector = new_collector()
    queries, keys, values = map(by_token, text(0))
    collector.add_text(0, queries, keys, values)
    before = collector.finish().key_moment.copy()
    keys[300, 1, 5] = np.nan
    with pytest.raises(ValueError, match="keys of layer 0, token 300, head 1, channel 5 is NaN"):
        collector.add_text(0, queries, keys, values)
    assert np.array_equal(collector.finish().key_moment, before)


def test_a_text_shorter_than_the_windows_is_refused():
    collector = new_collector()
    with pytest.raises(ValueError, match="a text of 256 tokens has no queries"):
        collector.add_text(0, *map(by_token, text(0, 256)))


def test_a_disk_that_fills_leaves_the_old_file_and_no_half_one(statistics, tmp_path):
    """The limit of a file's size stands in for the disk's end: the same write fails half way."""
    path = tmp_path / "stats.safetensors"
    path.write_bytes(b"what was there")

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    source = tmp_path / "source"
    statistics.write(source)
    done = subprocess.run([sys.executable, "-c", f"""
from crumb import profile
statistics = profile.load_statistics({str(source)!r})
try:
    statistics.write({str(path)!r})
except OSError as error:
    print("refused:", error)
"""], preexec_fn=limit, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused:") and str(path) in done.stdout, done.stdout + done.stderr
    assert path.read_bytes() == b"what was there"
    assert sorted(os.listdir(tmp_path)) == ["source", "stats.safetensors"]
