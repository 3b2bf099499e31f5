"""Other packages are needed only by those who use them."""

from __future__ import annotations

import pytest

import fresh


def test_importing_lowtide_imports_no_trainer_and_no_compiler():
    found = fresh.run(
        "import sys, lowtide; print({'transformers', 'accelerate', 'lightning', 'peft', 'trl'} & set(sys.modules)"
        " | {'torch._dynamo'} & set(sys.modules))"
    )
    assert found.stdout.strip() == "set()", found.stderr


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("hf", "transformers", "lowtide[hf]"), ("lightning", "lightning", "lowtide[lightning]")],
)
def test_without_its_package_a_callback_names_what_to_install(module, package, extra):
    found = fresh.run(
        f"import sys; sys.modules['{package}'] = None\n"
        f"from lowtide.integrations.{module} import LowtideCallback\n"
        f"try: LowtideCallback()\nexcept ImportError as error: print(error)"
    )
    assert f"pip install '{extra}'" in found.stdout, found.stderr
