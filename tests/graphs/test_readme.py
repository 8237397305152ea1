import re
import subprocess
import sys
from pathlib import Path

import graphs

NAMES = {
    *("CUDAGraphMode", "BatchDescriptor", "BreakableCUDAGraphCapture", "BreakableCUDAGraphWrapper"),
    *("eager_break_during_capture", "CUDAGraphWrapper", "CUDAGraphOptions", "CudaGraphManager"),
    *("set_forward_context", "get_forward_context"),
}


def test_the_package_exports_its_ten_names_and_the_readme_says_so():
    assert set(graphs.__all__) == NAMES
    assert all(callable(getattr(graphs, name)) for name in NAMES)
    paragraph = readme().split("`graphs` exports ")[1].split(";")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) == NAMES


def test_importing_the_package_loads_no_backend():
    code = "import sys, graphs; print(*{'graphs.cuda', 'graphs.tape.backend'} & set(sys.modules))"
    root = Path(graphs.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_the_example_runs_and_is_short():
    example = readme().split("```python\n")[1].split("```")[0]
    assert len([line for line in example.splitlines() if line]) <= 20
    exec(compile(example, "README.md", "exec"), {})


def readme():
    return (Path(graphs.__file__).parent / "README.md").read_text()
