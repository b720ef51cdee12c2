"""`after_import`: order, one call, real loader, failures."""

import importlib
import logging
import sys

import pytest

from dash_inductor import import_hook
from dash_inductor.import_hook import after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "hooked_module.py").write_text("VALUE = 1\n")
    (tmp_path / "broken_module.py").write_text("raise ImportError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "hooked_module"
    for name in ("hooked_module", "broken_module"):
        sys.modules.pop(name, None)
        import_hook._FINDER.waiting.pop(name, None)


def test_callbacks_run_once_in_order_after_the_body(module):
    seen = []
    after_import(module, lambda: seen.append(sys.modules[module].VALUE))
    after_import(module, lambda: seen.append("second"))
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [1, "second"]
    importlib.import_module(module)
    assert seen == [1, "second"]
    assert import_hook._FINDER not in sys.meta_path
    assert type(imported.__loader__).__module__ != import_hook.__name__
    assert imported.__spec__.loader is imported.__loader__
    importlib.reload(imported)
    assert seen == [1, "second"]


def test_an_imported_module_calls_at_once(module):
    importlib.import_module(module)
    seen = []
    after_import(module, lambda: seen.append(1))
    assert seen == [1]


def test_a_failing_callback_is_logged_and_the_rest_goes_on(module, caplog):
    seen = []
    after_import(module, lambda: 1 / 0)
    after_import(module, lambda: seen.append(1))
    with caplog.at_level(logging.WARNING):
        importlib.import_module(module)
    assert seen == [1]
    assert "ZeroDivisionError" in caplog.text


def test_a_required_callback_fails_the_import(module):
    after_import(module, lambda: 1 / 0, required=True)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(module)


def test_a_failed_import_keeps_the_callbacks(module, tmp_path):
    seen = []
    after_import("broken_module", lambda: seen.append(1))
    with pytest.raises(ImportError, match="broken"):
        importlib.import_module("broken_module")
    assert seen == []
    (tmp_path / "broken_module.py").write_text("VALUE = 'repaired'\n")
    importlib.invalidate_caches()
    importlib.import_module("broken_module")
    assert seen == [1]
