"""A process as small as one can be that behaves like a part of the stack, for supervision tests.

    python stand_in.py PORT [FOLDER] [WHAT ...]

It answers `/readyz`, ends on SIGTERM, and writes each of its starts as a line to FOLDER/PORT.
WHAT: `crash` ends at once with code 3; `unready` never gets ready; `leaves` is ready until there is
a file FOLDER/left; `stubborn` ignores SIGTERM;
`child` starts a process of its own in the same session and writes its pid to FOLDER/child; `twice`
crashes on the second start only.
"""

import signal
import socket
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Serve until a signal."""
    port, folder, *what = sys.argv[1:]
    starts = Path(folder) / port
    with starts.open("a") as file:
        file.write("start\n")
    count = len(starts.read_text().splitlines())
    print(f"stand-in on {port}, start {count}", flush=True)
    if "crash" in what or ("twice" in what and count == 2):
        print("no such weights", flush=True)
        sys.exit(3)
    if "stubborn" in what:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in what:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        (Path(folder) / "child").write_text(str(child.pid))
    with socket.create_server(("127.0.0.1", int(port))) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                left = "leaves" in what and (Path(folder) / "left").exists()
                connection.sendall(_answer(ready="unready" not in what and not left))


def _answer(*, ready: bool) -> bytes:
    status = "200 OK" if ready else "503 Busy"
    body = "{}" if ready else '{"error": {"message": "loading layer 3"}}'
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return f"{head}{body}".encode()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    main()
