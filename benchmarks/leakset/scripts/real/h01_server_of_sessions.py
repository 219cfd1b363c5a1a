"""An aiohttp server computes on a thread and keeps the states of at most 150 sessions."""
import asyncio
import collections
import subprocess
import sys
import time
import urllib.request

PORT, REQUESTS, MOST = 8392, 480, 150


def client():
    """Runs in a process of its own."""
    for number in range(REQUESTS):
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/session/{number}", b"x" * 4096).read()
                break
            except OSError:
                time.sleep(0.1)
        time.sleep(0.008)
    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/stop").read()


async def main():
    import torch
    from aiohttp import web
    from torch import nn

    sessions, over = collections.OrderedDict(), asyncio.Event()
    model = nn.GRU(64, 256, 2, batch_first=True).eval()

    def infer(name):
        with torch.inference_mode():
            out, state = model(torch.randn(1, 64, 64))
        sessions[name] = (out, state)
        while len(sessions) > MOST:
            sessions.popitem(last=False)
        return out.norm().item()

    async def session(request):
        await request.read()
        score = await asyncio.get_running_loop().run_in_executor(None, infer, request.match_info["name"])
        return web.json_response({"score": score})

    async def stop(request):
        over.set()
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/session/{name}", session), web.get("/stop", stop)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", PORT).start()
    users = subprocess.Popen([sys.executable, __file__, "--client"])
    await over.wait()
    await runner.cleanup()
    users.wait()
    print("done", REQUESTS)


if __name__ == "__main__":
    client() if "--client" in sys.argv else asyncio.run(main())
# mypy: ignore-errors
