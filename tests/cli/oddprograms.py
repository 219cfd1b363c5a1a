# ruff: noqa: E501
"""Odd programs, each a line of a table: `memtools run` changes neither what they print nor how they
end, for test_odd_programs.py.

A key of OFTEN has another mechanism each and runs in every test; ALL runs in `make fuzz`.
"""

from __future__ import annotations

import textwrap

_SIGNALS = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "XCPU", "CHLD", "CONT", "WINCH")
_TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.{optimizer}(model.parameters(), 0.1)
for _ in range(20):
    optimizer.zero_grad(); model(torch.randn(4, 2)).square().sum().backward(); optimizer.step()
print(model.weight.tolist(), torch.rand(1).item())
"""
_POOL = """
import multiprocessing as mp
def square(x): return x * x
if __name__ == "__main__":
    context = mp.get_context({method!r})
    with context.Pool(2) as pool: print(pool.map(square, range(5)))
    child = context.Process(target=print, args=("child",)); child.start(); child.join()
    print(child.exitcode)
"""
_KILLED_CHILD = """
import os, signal
child = os.fork()
if child == 0:
    signal.signal(signal.SIG{name}, signal.SIG_DFL); os.kill(os.getpid(), signal.SIG{name}); os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
_SIGWAIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIG{name}])
os.kill(os.getpid(), signal.SIG{name})
print(signal.sigwait([signal.SIG{name}]))
"""
_DEFAULT = (
    "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIG{name}); print('on')"
)
_IGNORED = """
import os, signal
signal.signal(signal.SIG{name}, signal.SIG_IGN); os.kill(os.getpid(), signal.SIG{name}); print('on')
"""
_HANDLED = """
import os, signal
signal.signal(signal.SIG{name}, lambda *_: print('handled'))
os.kill(os.getpid(), signal.SIG{name}); print('on')
"""
_LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_{name}, ({value}, {value}))
{body}
"""


def _by_signal(text: str, what: str, names: tuple[str, ...]) -> dict[str, str]:
    return {f"{what} SIG{name}": text.format(name=name) for name in names}


ALL: dict[str, str] = {
    **_by_signal(_SIGWAIT, "sigwait", _SIGNALS),
    **_by_signal(_DEFAULT, "default of", ("HUP", "QUIT", "TERM", "USR1", "USR2", "ALRM", "XCPU",
                                          "CHLD", "CONT", "WINCH", "SEGV", "ABRT", "BUS", "FPE",
                                          "ILL", "TRAP", "PIPE", "KILL")),
    **_by_signal(_IGNORED, "ignored", _SIGNALS),
    **_by_signal(_HANDLED, "handled", _SIGNALS),
    **_by_signal(_KILLED_CHILD, "a child killed by", ("TERM", "INT", "SEGV", "KILL", "USR1")),
    **{f"multiprocessing by {m}": _POOL.format(method=m) for m in ("fork", "spawn", "forkserver")},
    **{f"training by {o}": _TRAIN.format(optimizer=o) for o in ("SGD", "Adam", "AdamW", "RMSprop")},
    **{f"exit with {v}": f"import sys; sys.exit({v})" for v in (
        "0", "1", "255", "256", "300", "-1", "2**70", "None", "True", "2.5", "'text'", "('a', 1)",
        "'\\udcff'", "b'x'", "[]")},
    "RLIMIT_NOFILE": _LIMITED.format(name="NOFILE", value=20, body="""
kept = []
try:
    while True: kept.append(open('/dev/null'))
except OSError as error: print(error.errno)
"""),
    "RLIMIT_AS": _LIMITED.format(name="AS", value="900 << 20", body="""
try: bytearray(2 << 30)
except MemoryError: print('refused')
"""),
    "RLIMIT_FSIZE": _LIMITED.format(name="FSIZE", value=10, body="""
try:
    with open('made', 'w') as file: file.write('a' * 100)
except OSError as error: print(error.errno)
"""),
    "RLIMIT_CPU": _LIMITED.format(name="CPU", value=1, body="print('x', flush=True)\nwhile True: pass"),
    "RLIMIT_STACK": _LIMITED.format(name="STACK", value="1 << 20", body="print('x')"),
    "asyncio with a handler": """
        import asyncio, os, signal
        async def main():
            loop = asyncio.get_running_loop(); got = loop.create_future()
            loop.add_signal_handler(signal.SIGTERM, got.set_result, 7)
            loop.call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            print(await got)
        asyncio.run(main())
        """,
    "os._exit": "import os; print('x', flush=True); os._exit(7)",
    "exit in a thread": """
        import sys, threading
        thread = threading.Thread(target=lambda: sys.exit(3)); thread.start(); thread.join()
        print('main')
        """,
    "an exception in a thread": """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join(); print('main')
        """,
    "a busy daemon thread": """
        import threading, time
        threading.Thread(target=lambda: [time.sleep(0.001) for _ in iter(int, 1)], daemon=True).start()
        print('x')
        """,
    "atexit": "import atexit\nfor i in range(3): atexit.register(print, 'at', i)\nprint('main')",
    "atexit that raises": "import atexit\natexit.register(lambda: 1 / 0); print('main')",
    "atexit that forks": """
        import atexit, os
        def end():
            if os.fork() == 0: print('child', flush=True); os._exit(0)
            os.wait()
        atexit.register(end); print('main', flush=True)
        """,
    "finalizers": "import weakref\nclass A: pass\na = A(); weakref.finalize(a, print, 'gone'); print('x')",
    "segmentation fault": "import ctypes; print('x', flush=True); ctypes.string_at(0)",
    "segmentation fault in a thread": """
        import ctypes, threading
        print('x', flush=True)
        thread = threading.Thread(target=ctypes.string_at, args=(0,)); thread.start(); thread.join()
        """,
    "faulthandler": "import ctypes, faulthandler; faulthandler.enable(all_threads=False); print('x', flush=True); ctypes.string_at(0)",
    "faulthandler's timer": """
        import faulthandler, sys, time
        faulthandler.dump_traceback_later(0.05, file=open('/dev/null', 'w')); time.sleep(0.1)
        faulthandler.cancel_dump_traceback_later(); print('x')
        """,
    "faulthandler by a signal": """
        import faulthandler, os, signal
        faulthandler.register(signal.SIGUSR1, file=open('/dev/null', 'w'), chain=False)
        os.kill(os.getpid(), signal.SIGUSR1); print('x')
        """,
    "Ctrl-C that is caught": """
        import os, signal, time
        try: os.kill(os.getpid(), signal.SIGINT); time.sleep(1)
        except KeyboardInterrupt: print('caught')
        """,
    "Ctrl-C": "import os, signal, time\nprint('x', flush=True); os.kill(os.getpid(), signal.SIGINT); time.sleep(2)",
    "a timer's signals": """
        import signal, time
        count = [0]
        signal.signal(signal.SIGALRM, lambda *_: count.__setitem__(0, count[0] + 1))
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
        while count[0] < 5: pass
        signal.setitimer(signal.ITIMER_REAL, 0); print('x')
        """,
    "sigtimedwait": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [10]); print(signal.sigtimedwait([10], 0.01))",
    "a signal descriptor": """
        import os, signal
        reading, writing = os.pipe(); os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing); signal.signal(signal.SIGUSR1, lambda *_: None)
        os.kill(os.getpid(), signal.SIGUSR1); print(os.read(reading, 1))
        """,
    "handlers that Python sees": "import signal; print([signal.getsignal(s) for s in range(1, 32)])",
    "forked children that exit": """
        import os, sys
        for i in range(4):
            if os.fork() == 0: sys.exit(i)
        print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)))
        """,
    "a pre-forking server": """
        import os, signal, sys
        children = []
        for _ in range(3):
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); os.write(writing, b'r'); signal.pause()
            os.read(reading, 1); children.append(child)
        for child in children: os.kill(child, signal.SIGTERM)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
        """,
    "a daemon": """
        import os, sys
        if os.fork(): os.wait(); sys.exit(0)
        os.setsid(); os.closerange(3, 256)
        print(open('/proc/self/comm').read().strip())
        """,
    "descriptors closed": """
        import os
        os.closerange(3, 200)
        with open('x.txt', 'w') as file: file.write('abc' * 10)
        print(open('x.txt').read())
        """,
    "descriptors replaced": """
        import os
        for i in range(3, 30):
            try: os.fstat(i); os.dup2(1, i)
            except OSError: pass
        print('x')
        """,
    "stdout closed": "import os\nos.close(1)",
    "stderr closed": "import os; os.close(2); print('on')",
    "exit in atexit": "import atexit, sys\natexit.register(lambda: sys.exit(9))",
    "a thread that goes on": """
        import threading
        go = threading.Event()
        threading.Thread(target=lambda: (go.wait(), print('late'))).start()
        threading.Timer(0.05, go.set).start()
        print('main is done')
        """,
    "stderr is None": "import sys; sys.stderr = None; print('x')",
    "exec": """
        import os, sys
        print('a', flush=True)
        os.execv(sys.executable, [sys.executable, '-c', 'import os; print("MEMTOOLS_RUN" in os.environ)'])
        """,
    "a killed process": """
        import multiprocessing as mp, os
        def end(): os.kill(os.getpid(), 9)
        if __name__ == '__main__':
            child = mp.Process(target=end); child.start(); child.join(); print(child.exitcode)
        """,
    "SharedMemory": """
        from multiprocessing import shared_memory
        memory = shared_memory.SharedMemory(create=True, size=100); memory.buf[0] = 5
        print(memory.buf[0]); memory.close(); memory.unlink()
        """,
    "a subprocess": """
        import subprocess, sys
        code = 'import sys; print("memtools" in sys.modules)'
        print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout)
        """,
    "environment": "import os; print(sorted(os.environ.items()))",
    "arguments": "import sys; print(sys.argv, sys.path, sys.flags)",
    "standard input": "import sys; print(sys.stdin.read())",
    "pytest": """
        import pytest
        open('test_inner.py', 'w').write('def test_one(): pass')
        print(pytest.main(['-q', '-p', 'no:cacheprovider', '--no-header', '--tb=no', '-p', 'no:terminal', 'test_inner.py']))
        """,
    "settrace": """
        import sys
        count = [0]
        def hook(frame, event, arg): count[0] += 1; return hook
        def called(): return 5
        sys.settrace(hook); called(); sys.settrace(None); print(count)
        """,
    "gc": "import gc; print(gc.get_threshold(), gc.isenabled(), gc.callbacks, gc.get_freeze_count())",
    "an audit hook": "import sys\nn = set()\nsys.addaudithook(lambda e, a: n.add(e)); open('/dev/null').close(); print('open' in n)",
    "tracemalloc": "import tracemalloc\ntracemalloc.start(3); print(tracemalloc.get_traceback_limit()); tracemalloc.stop(); print(tracemalloc.is_tracing())",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0]); 1 / 0",
    "excepthook that raises": "import sys\ndef hook(*a): raise KeyError('h')\nsys.excepthook = hook; 1 / 0",
    "unraisable": "class A:\n    def __del__(self): 1 / 0\nA(); print('x')",
    "unraisablehook": "import sys\nsys.unraisablehook = lambda u: print(u.exc_type)\nclass A:\n    def __del__(self): 1 / 0\nA()",
    "an exception group": "raise ExceptionGroup('g', [ValueError(1), MemoryError('out of memory')])",
    "a syntax error": "def f(:\n  pass",
    "an odd text of an exception": "raise ValueError('\\udcff \\x1b[31m')",
    "an exception without a text": "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
    "MemoryError": "raise MemoryError('mine')",
    "a folder that is gone": "import os; os.makedirs('gone'); os.chdir('gone'); os.rmdir('../gone'); print('x')",
    "a umask": "import os; os.umask(0o777); open('closed', 'w').close(); print(oct(os.stat('closed').st_mode))",
    "metaclasses": "class M(type):\n    def __eq__(c, o): raise KeyError\nclass A(metaclass=M): pass\nkept = [A() for _ in range(9)]; print(len(kept))",
    "hostile modules": "import sys, types\nclass M(types.ModuleType):\n    def __getattribute__(s, n): raise KeyError(n)\nsys.modules['hostile'] = M('hostile'); print('x')",
    "an import hook": "import sys\nclass F:\n    def find_spec(s, n, p=None, t=None): print('asked', n)\nsys.meta_path.insert(0, F())\ntry: import nothing_here\nexcept ImportError: print('x')",
    "sub-interpreters": "import _xxsubinterpreters as s; i = s.create(); s.run_string(i, 'print(1)'); s.destroy(i); print('x')",
    "a sub-interpreter that imports memtools' libraries": "import _xxsubinterpreters as s; i = s.create(); s.run_string(i, 'import json; print(json.dumps(1))'); s.destroy(i); print('x')",
    "modules deleted": "import sys\nfor n in [n for n in sys.modules if n.startswith('json')]: del sys.modules[n]\nimport json; print(json.dumps(1))",
    "ignored children": """
        import os, signal, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if os.fork() == 0: os._exit(0)
        try: os.wait()
        except ChildProcessError: print('none')
        """,
    "a DataLoader": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0)
        for batch, in DataLoader(TensorDataset(torch.arange(20.0)), 4, num_workers=2, shuffle=True): print(batch.tolist())
        """,
    "torch's profiler": "import torch\nwith torch.profiler.profile() as p: torch.ones(3).sum()\nprint(len(p.events()) > 0)",
}  # fmt: skip

OFTEN = (
    "sigwait SIGTERM", "default of SIGSEGV", "default of SIGTERM", "default of SIGKILL",
    "handled SIGHUP", "multiprocessing by forkserver", "multiprocessing by spawn", "exit with None",
    "exit with 256", "exit with 'text'", "exit in atexit", "RLIMIT_NOFILE", "asyncio with a handler",
    "os._exit", "an exception in a thread", "a thread that goes on", "a busy daemon thread",
    "atexit that raises", "atexit that forks", "faulthandler", "Ctrl-C",
    "forked children that exit", "a daemon", "descriptors replaced", "stderr closed", "a subprocess",
    "standard input", "an exception group", "a syntax error", "excepthook that raises",
    "a folder that is gone", "settrace", "sub-interpreters", "an audit hook",
)  # fmt: skip


def program(name: str) -> str:
    return textwrap.dedent(ALL[name])
