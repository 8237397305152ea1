from pathlib import Path

import graphs


def test_the_example_runs_and_is_short():
    readme = (Path(graphs.__file__).parent / "README.md").read_text()
    example = readme.split("```python\n")[1].split("```")[0]
    assert len([line for line in example.splitlines() if line]) <= 20
    exec(compile(example, "README.md", "exec"), {})
