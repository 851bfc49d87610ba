"""Puts configurations and Slurm scripts into the package that is built; all else is in
pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """As ``megatron_dppo/examples`` in the build; a checkout has no such folder, and neither has an
    editable one."""

    def run(self) -> None:
        super().run()
        for folder in ("configs", "scripts/slurm"):
            for file in [] if self.editable_mode else sorted(Path(folder).glob("*.*")):
                place = Path(self.build_lib, "megatron_dppo/examples", file)
                self.mkpath(str(place.parent))
                self.copy_file(str(file), str(place))


setup(cmdclass={"build_py": BuildWithExamples})
