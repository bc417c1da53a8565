"""What a disk holds after the power failed: what was made durable, and an arbitrary part of the rest.

Beside the real file system a model keeps two versions of everything: as programs see it, and as it is on the disk for
certain. A file's content becomes certain by `fsync_file`, the names in a folder by `fsync_folder`.
"""

import os

from tests.checkpoint.disks import Crash, WatchedFileSystem


class File:
    def __init__(self, data=b""):
        self.seen = data
        self.certain = b""


class Folder:
    def __init__(self):
        self.seen = {}
        self.certain = {}


class PoweredDisk:
    """A model of the folder `root`, whose content at the start is certain.

    Args:
        root: The real folder.
        failure_number: The call before which the power fails.
    """

    def __init__(self, root, failure_number):
        self.root = str(root)
        self.top = self._load(self.root)
        self._failure_number = failure_number
        self.file_system = WatchedFileSystem(self._before)

    def _load(self, path):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                node = File(file.read())
            node.certain = node.seen
        else:
            node = Folder()
            node.seen = {name: self._load(os.path.join(path, name)) for name in os.listdir(path)}
            node.certain = dict(node.seen)
        return node

    def _find(self, path):
        node = self.top
        for part in os.path.relpath(path, self.root).split(os.sep):
            node = node if part == "." else node.seen[part]
        return node

    def _before(self, number, name, *arguments):
        if number >= self._failure_number:
            raise Crash
        if name == "fsync_folder":
            node = self._find(arguments[0])
            node.certain = dict(node.seen)
            return
        folder, last = self._find(os.path.dirname(arguments[0])), os.path.basename(arguments[0])
        if name == "make_folder":
            folder.seen.setdefault(last, Folder())
        elif name == "write":
            folder.seen.setdefault(last, File()).seen = arguments[1]
        elif name == "fsync_file":
            folder.seen[last].certain = folder.seen[last].seen
        elif name == "replace":
            self._find(os.path.dirname(arguments[1])).seen[os.path.basename(arguments[1])] = folder.seen.pop(
                last
            )
        else:
            del folder.seen[last]

    def write_what_is_left(self, path, choose):
        """Writes the disk after the failure.

        Args:
            path: A folder to make.
            choose: Gets "name" or "data" and says whether a change that is not certain came to the disk.
        """
        self._write(self.top, str(path), choose)

    def _write(self, node, path, choose):
        if isinstance(node, File):
            with open(path, "wb") as file:
                file.write(node.seen if node.seen == node.certain or choose("data") else node.certain)
            return
        os.mkdir(path)
        for name in sorted({*node.seen, *node.certain}):
            seen, certain = node.seen.get(name), node.certain.get(name)
            child = seen if seen is certain or choose("name") else certain
            if child is not None:
                self._write(child, os.path.join(path, name), choose)
