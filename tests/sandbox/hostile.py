"""Programs that want out, for `tests/sandbox/test_sandbox.py`. What gets through a wall says
ESCAPED.

Each kind is a function of a generator, which varies it. `@contained` names the outcomes that it may
have: how it ran ("ran", whatever the exit status), or the limits it may hit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Writer = Callable[[Random], str]

_HELPERS = """
import ctypes, errno, os, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def wall(what, attempt):
    try:
        got = attempt()
    except (OSError, ValueError, MemoryError):
        return
    print("ESCAPED", what, repr(got)[:200])

def syscall(what, number, *arguments):
    if libc.syscall(ctypes.c_long(number), *arguments) != -1:
        print("ESCAPED", what)
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """`write` makes a program; it may end as `outcomes` say."""

    write: Writer
    outcomes: frozenset[str]

    @property
    def quick(self) -> bool:
        """Whether it ends by itself."""
        return self.outcomes == {"ran"}


KINDS: dict[str, Kind] = {}


def contained(*outcomes: str) -> Callable[[Writer], Writer]:
    """Register a kind."""

    def register(write: Writer) -> Writer:
        KINDS[write.__name__] = Kind(lambda rng: _HELPERS + write(rng), frozenset(outcomes))
        return write

    return register


@contained("wall", "cpu", "ran")
def fork_bomb(rng: Random) -> str:
    body = rng.choice(
        [
            "os.fork()",
            "os.fork() or os.setsid()",
            "os.posix_spawn('/bin/sh', ['sh', '-c', ':'], {})",
        ]
    )
    return f"while True:\n    try:\n        {body}\n    except OSError:\n        pass"


@contained("wall", "cpu", "ran", "memory")
def thread_bomb(rng: Random) -> str:
    return f"""
threads = []
while True:
    try:
        threads.append(threading.Thread(target=time.sleep, args=({rng.randint(10, 99)},)))
        threads[-1].start()
    except RuntimeError:
        break
os._exit(0 if len(threads) < 100 else print("ESCAPED", len(threads)))
"""


@contained("ran", "cpu", "memory")
def memory_hog(rng: Random) -> str:
    return rng.choice(
        [
            "x = b'x'\nwhile True: x += x",
            f"x = bytearray({rng.randint(1, 9)} << 30); print('ESCAPED', len(x))",
            "x = []\nwhile True: x.append(bytes(1 << 20))",
            "import mmap\nx = mmap.mmap(-1, 1 << 30); x.write(b'x' * (1 << 30)); print('ESCAPED')",
        ]
    )


@contained("ran", "memory", "cpu", "wall")
def memory_of_many(rng: Random) -> str:
    """Each process is below the limit, all together are not."""
    return f"""
for _ in range(12):
    try:
        if os.fork() == 0:
            {rng.choice(["os.setsid()", "libc.prctl(4, 0, 0, 0, 0)", "pass"])}
            x = bytearray({rng.randint(60, 70)} << 20)
            for i in range(0, len(x), 4096): x[i] = 1
            time.sleep(60)
            os._exit(0)
    except OSError:
        sys.exit()
time.sleep(60)
"""


@contained("cpu", "wall")
def endless(rng: Random) -> str:
    return rng.choice(
        [
            "while True: pass",
            "x = 3\nwhile True: x = x * x",
            "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
            "print(len(str(7 ** 10 ** 8)))",
            "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
            "for s in set(range(1, 32)) - {9, 19}: signal.signal(s, lambda *_: None)\n"
            "while True: pass",
            "import itertools; sum(1 for _ in itertools.permutations(range(20)))",
        ]
    )


@contained("wall")
def idle(rng: Random) -> str:
    return rng.choice(
        [
            "time.sleep(1000)",
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "signal.pause()",
            "threading.Event().wait()",
            "threading.Thread(target=time.sleep, args=(1000,)).start()",
            "import atexit; atexit.register(time.sleep, 1000)",
            "r, w = os.pipe(); os.read(r, 1)",
            "os.close(0); os.close(1); os.close(2); time.sleep(1000)",
            "class C:\n    def __eq__(self, o): time.sleep(1000)\nC() == C()",
        ]
    )


@contained("output", "cpu", "wall")
def output_flood(rng: Random) -> str:
    stream = rng.choice([1, 2])
    return rng.choice(
        [
            f"while True: os.write({stream}, b'x' * {rng.choice([1, 100, 1 << 16])})",
            f"os.write({stream}, b'x' * (1 << 20)); time.sleep(1000)",
            "while True: print('flood')",
            "raise RuntimeError('x' * (1 << 20))",
            "[os.write(1, os.urandom(1 << 16)) for _ in range(10**9)]",
        ]
    )


@contained("ran")
def write_outside(rng: Random) -> str:
    places = [
        "/",
        "/etc/",
        "/usr/",
        "/usr/lib/",
        "/root/",
        "/home/",
        "/var/tmp/",
        "/dev/",
        "/sys/",
        "/proc/sys/kernel/",
    ]
    rng.shuffle(places)
    return f"""
own = [sys.prefix + "/", sys.prefix + "/lib/", os.path.dirname(os.__file__) + "/"]
for place in {places} + own:
    name = place + "agentrl-{rng.randrange(10**6)}"
    wall("wrote " + name, lambda: open(name, "w"))
    wall("made " + name, lambda: os.mkdir(name))
    wall("made a link " + name, lambda: os.symlink("x", name))
for name in ("/usr/bin/env", os.__file__, sys.executable, "/dev/sda", "/dev/vda", "/dev/mem",
             "/dev/kmsg"):
    wall("opened to write " + name, lambda: open(name, "r+b"))
    wall("removed " + name, lambda: os.unlink(name))
    wall("renamed " + name, lambda: os.rename(name, name + "x"))
    wall("changed " + name, lambda: os.chmod(name, 0o777))
    wall("truncated " + name, lambda: os.truncate(name, 0))
    wall("touched " + name, lambda: os.utime(name, (1, 1)))
"""


@contained("ran")
def read_secrets(rng: Random) -> str:
    return """
for name in ("/etc/shadow", "/etc/passwd", "/etc/hosts", "/etc/ssh", "/var/log",
             "/var/run/docker.sock", "/boot", "/home", "/root/.ssh", "/root/.bashrc", "/sys/class",
             "/run", "/mnt", "@SECRET@", "@CHECKOUT@"):
    wall("opened " + name, lambda: open(name, "rb").read(10))
    wall("listed " + name, lambda: os.listdir(name))
if any("SECRET" in name or "KEY" in name for name in os.environ):
    print("ESCAPED environment", os.environ)
for name in sys.modules:
    if name.startswith("agentrl"): print("ESCAPED", name)
"""


@contained("ran")
def read_proc(rng: Random) -> str:
    return """
pids = [1, 2, os.getppid(), @DRIVER@, *range(1, 400, 7)]
for pid in pids:
    if pid == os.getpid() or not pid:
        continue
    for name in ("environ", "maps", "mem", "cmdline", "root", "cwd", "fd", "exe", "status"):
        wall(f"/proc/{pid}/{name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(10))
        wall(f"list /proc/{pid}/{name}", lambda: os.listdir(f"/proc/{pid}/{name}"))
        wall(f"link /proc/{pid}/{name}", lambda: os.readlink(f"/proc/{pid}/{name}"))
for name in ("/proc/cpuinfo", "/proc/meminfo", "/proc/kcore", "/proc/kallsyms",
             "/proc/sys/kernel/hostname", "/proc/net/tcp", "/proc/version", "/proc/sysrq-trigger",
             "/proc/cmdline"):
    wall(name, lambda: open(name, "rb").read(10))
"""


@contained("ran")
def network(rng: Random) -> str:
    return f"""
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK,
                   socket.AF_PACKET, 38, 40):
        wall(f"socket {{family}} {{kind}}", lambda: socket.socket(family, kind))
wall("loopback", lambda: socket.create_connection(("127.0.0.1", @PORT@), timeout=0.2))
wall("loopback 6", lambda: socket.create_connection(("::1", @PORT@), timeout=0.2))
outside = ("{rng.choice(["1.1.1.1", "8.8.8.8"])}", 53)
wall("outside", lambda: socket.create_connection(outside, timeout=0.2))
wall("listen", lambda: socket.create_server(("127.0.0.1", 0)))
wall("pair of datagram sockets", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
one, other = socket.socketpair()
for address in (b"\\0agentrl-@DRIVER@", "@SECRET@"):
    wall("connect of a pair", lambda: one.connect(address))
    wall("bind of a pair", lambda: one.bind(address))
    wall("sendto of a pair", lambda: one.sendto(b"x", address))
"""


@contained("ran", "wall")
def kill_others(rng: Random) -> str:
    signals = rng.sample([1, 2, 3, 6, 9, 11, 13, 15, 19], 5)
    return f"""
me, before = os.getpid(), os.getppid()
for number in {signals}:
    for pid in (1, before, @DRIVER@, -@DRIVER@, 2, 3, *([-1] if {rng.randint(0, 1)} else [])):
        try:
            if pid != me: os.kill(pid, number)
        except OSError: pass
time.sleep(0.05)
if os.getppid() != before:
    print("ESCAPED: the parent is gone")
"""


@contained("ran")
def daemons(rng: Random) -> str:
    escapes = ["os.setsid()", "os.setpgid(0, 0)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"]
    lives = ["pass", "while True: time.sleep(0.001)", "for fd in range(3): os.close(fd)"]
    return f"""
def daemon(depth):
    try:
        if os.fork() == 0:
            {rng.choice(escapes)}
            if depth: daemon(depth - 1)
            {rng.choice(lives)}
            time.sleep(1000)
    except OSError:
        pass
daemon({rng.randint(1, 4)})
os._exit(0)
"""


@contained("ran")
def shells(rng: Random) -> str:
    line = rng.choice(
        [
            "sleep 1000 &",
            "nohup sleep 1000 >/dev/null 2>&1 &",
            "setsid sleep 1000 & sleep 0.01",
            "exec 3<>/dev/tcp/127.0.0.1/@PORT@ && echo ESCAPED",
        ]
    )
    return f"""
out = subprocess.DEVNULL if "sleep" in {line!r} else None
try:
    subprocess.run(["/bin/bash", "-c", {line!r}], stderr=subprocess.DEVNULL, stdout=out)
except OSError:
    pass
"""


@contained("ran")
def links(rng: Random) -> str:
    target = rng.choice(
        ["/etc", "/root", "/", "/proc/1/root", "/etc/shadow", "../../../../../../etc", "@SECRET@"]
    )
    return f"""
os.symlink({target!r}, "link")
wall("through a link",
     lambda: open("link/shadow").read() if os.path.isdir("link") else open("link").read())
wall("write through a link", lambda: open("link/agentrl", "w"))
for name in ("/etc/shadow", "@SECRET@"):
    wall("hard link", lambda: os.link(name, "hard"))
wall("dotdot", lambda: open("../" * 30 + "etc/shadow"))
wall("through my root", lambda: open("/proc/self/root/etc/shadow"))
wall("through my folder", lambda: open("/proc/self/cwd/../etc/shadow"))
"""


@contained("ran", "cpu", "wall", "memory", "output")
def recursion(rng: Random) -> str:
    return rng.choice(
        [
            "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
            "eval('(' * 10**5 + ')' * 10**5)",
            "sys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return "
            "repr(self)\nprint(repr(A()))",
            "x = []\nfor _ in range(10**6): x = [x]\nprint(x == x, str(x)[:10])",
            "exec('x' + '.x' * 10**6)",
            "threading.stack_size(1 << 26)\ndef f(): f()\nthreading.Thread(target=f).start()",
            "import json; json.loads('[' * 10**6)",
        ]
    )


@contained("ran", "disk", "cpu", "wall")
def huge_files(rng: Random) -> str:
    return rng.choice(
        [
            "open('x', 'wb').write(bytes(1 << 25)); print('ESCAPED')",
            "f = open('x', 'wb'); f.truncate(1 << 40); print('ESCAPED')",
            "for i in range(10**6): open(str(i), 'wb').write(bytes(1 << 20))\nprint('ESCAPED')",
            "for i in range(10**6): open(str(i), 'w').close()\nprint('ESCAPED')",
            "for i in range(10**6): os.mkdir('d'); os.chdir('d')\nprint('ESCAPED')",
            "f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
            "import tempfile\nfs = []\nwhile True: fs.append(tempfile.TemporaryFile()); "
            "fs[-1].write(bytes(1 << 20))",
            "fd = os.memfd_create('x'); os.write(fd, b'x'); print('ESCAPED')",
        ]
    )


@contained("ran")
def trace(rng: Random) -> str:
    return """
for pid in (1, os.getppid(), @DRIVER@):
    for request in (16, 0x4206):
        if libc.ptrace(request, pid, 0, 0) != -1: print("ESCAPED ptrace", pid)
    vector = (ctypes.c_size_t * 2)(id(pid), 8)
    if libc.process_vm_readv(pid, vector, 1, vector, 1, 0) != -1: print("ESCAPED process_vm_readv")
    if libc.process_vm_writev(pid, vector, 1, vector, 1, 0) != -1:
        print("ESCAPED process_vm_writev")
    wall("limits of others", lambda: __import__("resource").prlimit(pid, 7, (1, 1)))
"""


@contained("ran")
def privileges(rng: Random) -> str:
    return """
for flags in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x10020000):
    if libc.unshare(flags) != -1: print("ESCAPED unshare", flags)
    if libc.clone(None, None, flags | 17, None) != -1: print("ESCAPED clone")
if libc.mount(b"none", b"/box", b"tmpfs", 0, None) != -1: print("ESCAPED mount")
if libc.mount(None, b"/", None, 32 | 4096, None) != -1: print("ESCAPED remount")
if libc.umount2(b"/proc", 2) != -1 or libc.umount2(b"/box", 2) != -1: print("ESCAPED umount")
if libc.setns(0, 0) != -1: print("ESCAPED setns")
wall("chroot", lambda: os.chroot("."))
wall("setuid", lambda: os.getuid() and os.setuid(0) or open("/no"))
wall("host name", lambda: socket.sethostname("x"))
wall("clock", lambda: time.clock_settime(0, 0))
wall("nice", lambda: os.nice(-20))
wall("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
wall("device", lambda: os.mknod("d", 0o20666, os.makedev(1, 1)))
wall("limits", lambda: __import__("resource").setrlimit(9, (1 << 40, 1 << 40)))
old = os.uname().machine == "x86_64"
for number in (425, 428, 430, 442, 447, *((29, 101, 175, 240, 246, 248, 298, 321) if old else ())):
    syscall(f"syscall {number}", number, None, None, None, None, None)
syscall("x32", 0x40000000 | 39)
syscall("a call of the future", 500)
"""


@contained("ran")
def crashes(rng: Random) -> str:
    return rng.choice(
        [
            "ctypes.string_at(0)",
            "os.abort()",
            "os._exit(0)",
            "os._exit(77)",
            "os.kill(os.getpid(), 9)",
            "sys.stdout = None; sys.stderr = None",
            "del sys.modules['sys'], sys.stdout",
            "sys.exit('bye')",
            "raise KeyboardInterrupt",
            "import builtins; builtins.__dict__.clear()",
            "os.execv('/bin/false', ['x'])",
            "sys.settrace(lambda *_: 1/0)\ndef f(): pass\nf()",
            "def",
            "\\0",
            "\\ud800",
            "raise SystemExit(1 << 40)",
            "__import__('faulthandler')._sigsegv()",
            "threading.excepthook = None; threading.Thread(target=lambda: 1/0).start()",
            "import gc; [x.clear() for x in gc.get_objects() if isinstance(x, dict) and x is not "
            "globals()]",
        ]
    )


@contained("ran", "output")
def forgery(rng: Random) -> str:
    """Answers in the server's place, on every descriptor that there may be."""
    return """
import json
body = json.dumps({"hit": "", "exit": 0, "stdout": "FORGED", "stderr": "", "seconds": 0.0}).encode()
for fd in (0, *range(3, 256)):
    try:
        os.write(fd, struct.pack("!I", len(body)) + body)
        print("ESCAPED wrote to", fd)
    except OSError:
        pass
sys.exit(3)
"""


@contained("ran")
def leftovers(rng: Random) -> str:
    """Leaves what it can for the next one, and looks for what the last one left."""
    last = [
        "os.mkdir('d'); os.chmod('d', 0)",
        "os.mkdir('d', 0)",
        "open('.hidden', 'w')",
        "os.mkfifo('fifo')",
    ]
    return f"""
for place in (".", "/tmp", "/dev/shm", "/box"):
    try: left = os.listdir(place)
    except OSError: continue
    if left: print("ESCAPED: files of another run in", place, left)
for place in (".", "/tmp", "/dev/shm", "/box"):
    try: open(place + "/left-by-me", "w").write("x")
    except OSError: pass
for module in ("json", "math", "os"):
    if hasattr(__import__(module), "left"): print("ESCAPED: a module of another run")
    __import__(module).left = 1
if "LEFT" in os.environ: print("ESCAPED: the environment of another run")
os.environ["LEFT"] = "x"; os.putenv("LEFT", "x")
os.umask(0o777)
{rng.choice(last)}
"""


@contained("ran", "wall", "cpu")
def orphans(rng: Random) -> str:
    return """
for _ in range(500):
    try:
        if os.fork() == 0:
            if os.fork() == 0: os._exit(0)
            os._exit(0)
        os.wait()
    except OSError:
        pass
"""


@contained("ran")
def inputs(rng: Random) -> str:
    return rng.choice(
        [
            "os.close(0)",
            "sys.stdin.read(); print('x')",
            "input()",
            "os.dup2(1, 0); time.sleep(0.01)",
        ]
    )


@contained("ran", "memory", "cpu", "wall")
def socket_buffers(rng: Random) -> str:
    """Memory of the kernel: much more than the limit, in the buffers of many sockets, of processes
    or on their way.
    """
    many, way = rng.randint(6, 12), rng.choice(["larger", "hidden", "plain"])
    return f"""
held = []
def fill():
    while True:
        try:
            one, other = socket.socketpair()
        except OSError:
            return
        try:
            if {way!r} == "larger": one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            if {way!r} == "hidden" and held:
                socket.send_fds(held[-1], [b"x"], [one.fileno(), other.fileno()])
        except OSError:
            pass
        one.setblocking(False)
        held.extend((one, other))
        try:
            while True: one.send(b"x" * 65536)
        except OSError:
            pass
for _ in range({many}):
    try:
        if os.fork() == 0:
            fill()
            time.sleep(60)
    except OSError:
        break
fill()
time.sleep(60)
"""


@contained("cpu", "wall")
def hidden_cpu(rng: Random) -> str:
    """Short child processes whose parent never waits, so that no sum has their CPU time."""
    how = rng.choice(["signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "struct_of_sigaction()"])
    return f"""
def struct_of_sigaction():  # SA_NOCLDWAIT
    libc.syscall(ctypes.c_long(13), 17, struct.pack("QQQQ", 0, 2 | 0x04000000, 0, 0), 0, 8)
try:
    {how}
except OSError:
    pass
end = time.time() + 60
while time.time() < end:
    try:
        if os.fork() == 0:
            begun = time.perf_counter()
            while time.perf_counter() < begun + {rng.uniform(0.004, 0.015):.4f}: pass
            os._exit(0)
    except OSError:
        pass
    time.sleep(0.001)
"""


@contained("ran")
def scarce_objects(rng: Random) -> str:
    """What the machine or a user has only so many of."""
    return f"""
context = ctypes.c_ulong(0)
syscall("made an AIO context", {{"x86_64": 206, "aarch64": 0}}[os.uname().machine],
        {rng.randint(1, 60000)}, ctypes.byref(context))
if libc.inotify_init1({rng.choice([0, 0x80000])}) != -1: print("ESCAPED: watches files")
if libc.inotify_init() != -1: print("ESCAPED: watches files")
"""


@contained("ran")
def thief(rng: Random) -> str:
    """Looks in its memory for what an earlier program was, has read and has written, and leaves a
    mark for the next.
    """
    mark = f"{rng.randrange(16**8):08x}"
    return f"""
print(sys.stdin.read(), "LOOT-{mark}")  # what is worth stealing
pattern = b"LO" + b"OT-"
reading, writing = os.pipe()
libc.sbrk.restype = ctypes.c_void_p
big = bytearray(1 << 20)
starts = {{libc.sbrk(0), id(object()), id("x" * 300),
          ctypes.addressof((ctypes.c_char * len(big)).from_buffer(big))}}
seen, found = set(), set()
for start in starts:
    for page in range(-(24 << 20) // 4096, (8 << 20) // 4096):
        address = (start & ~4095) + page * 4096
        if address in seen:
            continue
        if libc.write(writing, ctypes.c_void_p(address), ctypes.c_size_t(4096)) != 4096:
            continue
        seen.add(address)
        part = os.read(reading, 4096)
        at = part.find(pattern)
        while at >= 0:
            found.add(part[at : at + 13])
            at = part.find(pattern, at + 1)
for loot in found:
    if loot[5:] != b"{mark}" and loot[5:].isalnum(): print("ESC" + "APED", loot)
"""


@contained("ran")
def shared_files(rng: Random) -> str:
    """Stalls others, or tells them something, by a file that all programs may read: leases,
    notices, locks, hints.
    """
    return f"""
import fcntl
file = open({rng.choice(["os.__file__", "struct.__file__", "sys.executable"])}, "rb")
folder = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, {rng.randrange(100)}, 1, 0)
wall("took a lease", lambda: fcntl.fcntl(file, 1024, fcntl.F_RDLCK))
wall("is told of changes", lambda: fcntl.fcntl(folder, 1026, 0x8000003F))
wall("sees who locks", lambda: fcntl.fcntl(file, fcntl.F_GETLK, asked))
wall("sees who locks", lambda: fcntl.fcntl(file, 36, asked))
wall("locked it for all",
     lambda: fcntl.flock(file, fcntl.LOCK_{rng.choice(["EX", "SH"])} | fcntl.LOCK_NB))
wall("left a hint", lambda: fcntl.fcntl(file, 1036, struct.pack("Q", {rng.randint(1, 5)})))
syscall("has files of its own", 436, 100, 200, 2)
"""
