"""Print the requirements of the project's extras: what an image installs before the project itself.

    python3 requirements.py PYPROJECT [EXTRA ...]

Of the dependencies those that `tool.kimistack.image-dependencies` names for every one of the
extras, or all. So the layer of the dependencies stays the same while the sources change.
"""

import re
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    pyproject = tomllib.load(file)
asked, project = sys.argv[2:], pyproject["project"]
fewer = pyproject["tool"]["kimistack"]["image-dependencies"]
wanted = project["dependencies"]
if asked and all(extra in fewer for extra in asked):
    needed = {name for extra in asked for name in fewer[extra]}
    wanted = [line for line in wanted if re.split(r"[^\w-]", line)[0] in needed]
wanted = [*wanted, *(line for name in asked for line in project["optional-dependencies"][name])]
sys.stdout.write("\n".join(wanted) + "\n")
