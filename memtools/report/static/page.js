"use strict";
// Draws the charts of the page from its JSON. Nothing is loaded, nothing is sent.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const number = new Intl.NumberFormat("en");
  const LANE = 15, MARK_COLOURS = { finding: "--bad", leak: "--bad", oom: "--bad", guard: "--bad", holder: "--warn",
    pressure: "--warn", cleanup: "--good", mark: "--accent" };
  const RANK = { oom: 0, guard: 1, finding: 2, leak: 2, holder: 3, pressure: 4, end: 5, start: 6, mark: 7, cleanup: 8 };
  const groups = new Map(); // charts that share the x axis: "r0", "r1", "all"
  const stacks = [];

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function element(name, className, text, parent) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  // --- numbers as text -------------------------------------------------------------------------

  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

  // What lies in the middle goes to the even digit, as in the tables.
  function fixed(value, digits) {
    const scaled = value * 10 ** digits, whole = Math.floor(scaled);
    return (scaled - whole === 0.5 && whole % 2 === 0 ? whole / 10 ** digits : value).toFixed(digits);
  }

  function bytes(value) {
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < 6) { value /= 1024; unit++; }
    return `${unit ? fixed(value, unit > 2 && value < 10 ? 2 : 1) : value} ${UNITS[unit]}`;
  }

  function duration(seconds) {
    if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
    const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
    return `${number.format(Math.floor(whole / 3600))} h ${two(Math.floor(whole / 60) % 60)} min`;
  }

  const FORMATS = {
    bytes,
    percent: (value) => `${(value / 100).toFixed(2)} %`,
  };

  function byteTicks(u, ticks) {
    const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1, top = ticks[ticks.length - 1] || 0;
    let unit = 0;
    while (unit < 6 && step >= 1024 ** (unit + 1) / 8 && top >= 1024 ** (unit + 1)) unit++;
    return ticks.map((tick) => (tick === 0 ? "0" : `${+(tick / 1024 ** unit).toFixed(3)} ${UNITS[unit]}`));
  }

  function timeTicks(u, ticks) {
    const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1, end = ticks[ticks.length - 1];
    const two = (n) => String(n).padStart(2, "0");
    return ticks.map((tick) => {
      if (end < 120 || step < 1) return `${+tick.toFixed(3)} s`;
      const whole = Math.round(tick), hours = Math.floor(whole / 3600);
      const rest = `${hours ? two(Math.floor(whole / 60) % 60) : Math.floor(whole / 60)}:${two(whole % 60)}`;
      return hours ? `${number.format(hours)}:${rest}` : rest;
    });
  }

  const stepTicks = (u, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? number.format(tick) : ""));

  const TICKS = { bytes: byteTicks, percent: (u, ticks) => ticks.map((tick) => `${+(tick / 100).toFixed(2)} %`) };
  const BYTE_STEPS = Array.from({ length: 64 }, (_, k) => 2 ** k);
  const TIME_STEPS = [.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
    3600, 7200, 14400, 21600, 43200, ...Array.from({ length: 40 }, (_, k) => 86400 * 2 ** k)];

  // --- the x axis: seconds, or steps with what happens within one spread over it -----------------

  function stepAxis(record) {
    const steps = record.step, ms = record.ms, found = new Array(ms.length);
    let from = 0, now = 0;
    for (let i = 0; i <= ms.length; i++) {
      const step = i < ms.length ? Math.max(now, steps[i] === null ? now : steps[i]) : now + 1;
      if (i < ms.length && step === now) continue;
      const end = i < ms.length ? ms[i] : record.end + 1;
      for (let k = from; k < i; k++) found[k] = now + (end > ms[from] ? (ms[k] - ms[from]) / (end - ms[from]) : 0);
      from = i;
      now = step;
    }
    return found;
  }

  function axisOf(record, mode) {
    const key = `x ${mode}`;
    if (!record[key]) record[key] = mode === "steps" ? stepAxis(record) : record.ms.map((ms) => ms / 1000);
    return record[key];
  }

  function indexBefore(sorted, value) {
    let low = 0, high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (sorted[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  }

  function xAt(record, ms, mode) {
    if (mode === "time" || !record.ms.length) return ms / 1000;
    return axisOf(record, mode)[indexBefore(record.ms, ms)];
  }

  // --- one chart ---------------------------------------------------------------------------------

  function table(chart, mode) {
    // One table per record, then joined: uPlot wants all lines over the same x.
    const tables = [], series = [], bands = [];
    let count = 1;
    for (const line of chart.lines) {
      const record = data.records[line.record], x = axisOf(record, mode), values = record.lines[line.key];
      const flat = values.level !== undefined;
      const most = flat ? x.map(() => values.level) : values.most;
      tables.push(values.least ? [x, most, values.least] : [x, most]);
      line.at = count;
      const stroke = colour(line.colour === "limit" ? "--limit" : `--${line.colour}`);
      const shared = { show: line.on, spanGaps: flat || values.sparse || chart.several, points: { show: false } };
      series.push({ ...shared, stroke, width: 1.6, dash: line.colour === "limit" ? [6, 4] : undefined });
      count++;
      if (values.least) {
        series.push({ ...shared, width: 0 });
        bands.push({ series: [count - 1, count], fill: stroke + "30" });
        count++;
      }
    }
    const one = tables.every((t) => t[0] === tables[0][0]);
    const columns = one ? [tables[0][0], ...tables.flatMap((t) => t.slice(1))] : uPlot.join(tables);
    return { columns, series, bands };
  }

  function axisStyle() {
    const font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
    return { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, font,
      ticks: { stroke: colour("--line"), width: 1, size: 5 } };
  }

  // The button below a chart that names a line, shows its figure and turns it on and off.
  function keyOf(line, legend, turned) {
    const made = element("button", "", "", legend);
    made.type = "button";
    made.setAttribute("aria-pressed", line.on);
    element("span", `key ${line.colour}`, "", made);
    element("bdi", "", line.label, made);
    line.output = element("output", "", "", made);
    made.addEventListener("click", () => {
      line.on = !line.on;
      made.setAttribute("aria-pressed", line.on);
      turned();
    });
  }

  class Chart {
    constructor(place, description) {
      this.place = place;
      this.lines = description.lines;
      this.unit = description.unit;
      this.group = groups.get(place.dataset.chart.split("-")[0]);
      this.several = place.dataset.chart.startsWith("all-");
      this.record = this.several ? null : data.records[this.lines[0].record];
      this.host = place.dataset.chart.endsWith("-host");
      this.fromZero = true;
      this.bar = place.querySelector(".bar");
      this.plot = place.querySelector(".plot");
      this.legend = place.querySelector(".legend");
      this.height = { percent: 130 }[this.unit] || (this.host || this.several ? 320 : 240);
      this.controls();
      this.keys();
      this.build();
      new ResizeObserver(() => this.resize()).observe(this.plot);
      this.plot.addEventListener("keydown", (event) => this.key(event));
      this.group.charts.push(this);
    }

    controls() {
      this.at = element("span", "at", "", this.bar);
      const button = (text, label, action) => {
        const made = element("button", "", text, this.bar);
        made.type = "button";
        made.title = label;
        if (text.length < 2) made.setAttribute("aria-label", label);
        made.addEventListener("click", action);
        return made;
      };
      const stepped = this.lines.every((line) => data.records[line.record].step);
      if (stepped) {
        this.modes = ["time", "steps"].map((mode) =>
          button(mode === "time" ? "Time" : "Steps", `show ${mode} on the x axis`, () => this.group.setMode(mode)));
      }
      const zero = button("From 0", "start the axis at 0", () => {
        this.fromZero = !this.fromZero;
        zero.setAttribute("aria-pressed", this.fromZero);
        this.u.redraw(true, true);
        this.rescale();
      });
      zero.setAttribute("aria-pressed", true);
      button("−", "zoom out", () => this.group.zoom(2));
      button("+", "zoom in", () => this.group.zoom(0.5));
      button("←", "scroll left", () => this.group.pan(-0.5));
      button("→", "scroll right", () => this.group.pan(0.5));
      button("All", "show the whole run (or double-click)", () => this.group.setRange(null));
    }

    keys() {
      for (const line of this.lines) {
        keyOf(line, this.legend, () => {
          this.u.batch(() => {
            this.u.setSeries(line.at, { show: line.on });
            if (data.records[line.record].lines[line.key].least) this.u.setSeries(line.at + 1, { show: line.on });
          });
          this.read();
        });
      }
    }

    options(found) {
      const axis = axisStyle();
      const steps = this.group.mode === "steps", marked = this.record && this.unit === "bytes";
      return {
        width: this.width(), height: this.height, series: [{}, ...found.series], bands: found.bands,
        legend: { show: false }, padding: [marked ? 24 : 10, 14, 0, 0],
        cursor: { drag: { x: true, y: false, dist: 4 }, y: false, points: { show: false },
          sync: { key: this.group.name, setSeries: false } },
        scales: {
          x: { time: false, range: (u, min, max) => (min === max ? [min - 0.5, max + 0.5] : [min, max]) },
          y: { range: (u, min, max) => this.yRange(min, max) },
        },
        axes: [
          { ...axis, size: 30, space: 64, values: steps ? stepTicks : timeTicks, ...(steps ? {} : { incrs: TIME_STEPS }) },
          { ...axis, size: 76, space: 44, values: TICKS[this.unit], ...(this.unit === "bytes" ? { incrs: BYTE_STEPS } : {}) },
        ],
        hooks: {
          draw: [(u) => { if (marked) this.marks(u); if (this.host) this.lanes(u); }],
          setScale: [(u, key) => { if (key === "x") this.group.follow(this, u.scales.x.min, u.scales.x.max); }],
          setCursor: [() => this.read()],
        },
      };
    }

    yRange(min, max) {
      if (min === null || max === null) return [0, 1];
      const low = this.fromZero ? 0 : Math.max(0, min - (max - min) * 0.05);
      return [low, max > low ? max + (max - low) * 0.05 : low + 1];
    }

    width() { return Math.max(240, Math.floor(this.plot.clientWidth)); }

    build() {
      if (this.u) this.u.destroy();
      const found = table(this, this.group.mode);
      this.u = new uPlot(this.options(found), found.columns, this.plot);
      if (this.host && this.record.lanes.length && !this.lane) {
        this.lane = element("canvas", "lanes", "", this.plot);
        this.lane.setAttribute("aria-hidden", "true");
      }
      if (this.lane) this.plot.append(this.lane);
      if (this.modes) {
        this.modes.forEach((made, i) => made.setAttribute("aria-pressed", this.group.mode === ["time", "steps"][i]));
      }
      this.read();
    }

    resize() {
      if (this.u && this.u.width !== this.width()) this.u.setSize({ width: this.width(), height: this.height });
    }

    rescale() { this.u.setScale("x", { min: this.u.scales.x.min, max: this.u.scales.x.max }); }

    // Events: a line each, and its letter where there is room.
    marks(u) {
      const ctx = u.ctx, ratio = devicePixelRatio || 1, { left, top, width, height } = u.bbox;
      ctx.save();
      ctx.font = `bold ${11 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      this.marked = [];
      for (const [ms, kind, text] of this.record.marks) {
        const x = u.valToPos(xAt(this.record, ms, this.group.mode), "x", true);
        if (!(x >= left - 1 && x <= left + width + 1)) continue;
        this.marked.push([(x - left) / ratio, kind, text, x]);
        ctx.strokeStyle = colour(MARK_COLOURS[kind] || "--soft");
        ctx.globalAlpha = 0.6;
        ctx.lineWidth = ratio;
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
      }
      ctx.globalAlpha = 1;
      const taken = [], rank = (kind) => (kind in RANK ? RANK[kind] : 9);
      for (const [, kind, , x] of [...this.marked].sort((a, b) => rank(a[1]) - rank(b[1]))) {
        if (taken.some((other) => Math.abs(x - other) < 17 * ratio)) continue;
        taken.push(x);
        ctx.fillStyle = colour(MARK_COLOURS[kind] || "--soft");
        ctx.beginPath();
        ctx.roundRect(x - 8 * ratio, top - 19 * ratio, 16 * ratio, 16 * ratio, 4 * ratio);
        ctx.fill();
        ctx.fillStyle = colour("--bg");
        ctx.fillText(data.letters[kind] || "?", x, top - 10.5 * ratio);
      }
      ctx.restore();
    }

    // Phases: a row each below the time line, named in the margin.
    lanes(u) {
      const canvas = this.lane, lanes = this.record.lanes;
      if (!canvas) return;
      const ratio = devicePixelRatio || 1, left = u.bbox.left / ratio, right = left + u.bbox.width / ratio;
      const width = u.width, height = lanes.length * (LANE + 3) + 4, ctx = canvas.getContext("2d");
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      ctx.scale(ratio, ratio);
      ctx.font = "11px system-ui, sans-serif";
      ctx.textBaseline = "middle";
      const ink = colour("--soft"), panel = colour("--panel"), bar = colour("--lane"), mode = this.group.mode;
      lanes.forEach((lane, row) => {
        const top = row * (LANE + 3);
        ctx.fillStyle = panel;
        ctx.fillRect(left, top, right - left, LANE);
        ctx.fillStyle = ink;
        ctx.textAlign = "right";
        ctx.fillText(shortened(ctx, lane.name, left - 10), left - 6, top + LANE / 2);
        ctx.fillStyle = bar;
        for (const [ms, took] of lane.spans) {
          const from = u.valToPos(xAt(this.record, ms, mode), "x"), to = u.valToPos(xAt(this.record, ms + took, mode), "x");
          const a = Math.max(left, left + from), b = Math.min(right, left + Math.max(to, from + 1.5));
          if (b > a) ctx.fillRect(a, top, b - a, LANE);
        }
      });
    }

    // The figures below the chart: at the cursor, or the peaks of what is in view.
    read() {
      const u = this.u;
      if (!u || !u.data) return;
      const idx = u.cursor.left >= 0 ? u.cursor.idx : null, format = FORMATS[this.unit];
      const [min, max] = [u.scales.x.min, u.scales.x.max];
      for (const line of this.lines) {
        const values = u.data[line.at], known = (v) => v !== null && v !== undefined;
        let found = null;
        if (idx !== null && idx !== undefined) {
          for (let k = 0; k < 60 && !known(found); k++) found = known(values[idx - k]) ? values[idx - k] : values[idx + k];
        } else {
          for (let i = 0; i < values.length; i++) {
            if (known(values[i]) && !(u.data[0][i] < min || u.data[0][i] > max) && !(values[i] <= found)) found = values[i];
          }
        }
        line.output.textContent = known(found) ? format(found) : "–";
      }
      this.at.textContent = idx === null || idx === undefined ? "Below: the peak of each line in view" : this.where(idx);
    }

    where(idx) {
      const x = this.u.data[0][idx], steps = this.group.mode === "steps";
      if (!this.record) return steps ? `Step ${number.format(Math.floor(x))}` : duration(x);
      const step = this.record.step && this.record.step[idx];
      let text = duration(this.record.ms[idx] / 1000);
      if (step !== null && step !== undefined) text += `, step ${number.format(step)}`;
      const near = (this.marked || []).filter(([at]) => Math.abs(at - this.u.cursor.left) < 6);
      return near.length ? `${text} · ${near.map(([, kind, what]) => `${kind}: ${what}`).join(" · ")}` : text;
    }

    key(event) {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (move) this.move(move * (event.shiftKey ? 10 : 1));
      else if (event.key === "+" || event.key === "=") this.group.zoom(0.5);
      else if (event.key === "-") this.group.zoom(2);
      else if (event.key === "PageUp") this.group.pan(-0.5);
      else if (event.key === "PageDown") this.group.pan(0.5);
      else if (event.key === "0" || event.key === "Home") this.group.setRange(null);
      else if (event.key === "Escape") this.u.setCursor({ left: -10, top: -10 });
      else return;
      event.preventDefault();
    }

    // To the next cell that is at least a pixel further on.
    move(by) {
      const u = this.u, x = u.data[0], middle = (u.scales.x.min + u.scales.x.max) / 2;
      const idle = u.cursor.left < 0 || u.cursor.idx === null || u.cursor.idx === undefined;
      let idx = idle ? indexBefore(x, middle) : u.cursor.idx;
      const from = u.valToPos(x[idx], "x");
      while (idx + Math.sign(by) >= 0 && idx + Math.sign(by) < x.length) {
        idx += Math.sign(by);
        if (Math.abs(u.valToPos(x[idx], "x") - from) >= Math.abs(by)) break;
      }
      u.setCursor({ left: u.valToPos(x[idx], "x"), top: 10 });
    }
  }

  // --- a recorded step ---------------------------------------------------------------------------

  // What lived over it, stacked: a column for each interval, its phases below, and its peak.
  class Stack {
    constructor(place, description) {
      this.plot = place.querySelector(".plot");
      this.legend = place.querySelector(".legend");
      this.at = element("span", "at", "", place.querySelector(".bar"));
      this.height = 300;
      this.show(description);
      new ResizeObserver(() => this.resize()).observe(this.plot);
      this.plot.addEventListener("keydown", (event) => this.key(event));
    }

    // Draws this description in place of the one before; what was turned off stays off.
    show(description) {
      const off = new Set((this.lines || []).filter((line) => !line.on).map((line) => line.label));
      this.lines = description.lines;
      this.spans = description.spans;
      this.highest = description.highest;
      this.top = description.top;
      this.count = this.lines[0].bytes.length;
      this.sums = Array.from({ length: this.count }, (_, at) => this.lines.reduce((sum, line) => sum + line.bytes[at], 0));
      this.legend.replaceChildren();
      for (const line of this.lines) {
        line.on = !off.has(line.label);
        keyOf(line, this.legend, () => this.build());
      }
      this.build();
    }

    width() { return Math.max(240, Math.floor(this.plot.clientWidth)); }

    resize() {
      if (this.u.width !== this.width()) this.u.setSize({ width: this.width(), height: this.height });
    }

    // Each line on top of those before it; the last column is drawn to its end. The highest is drawn first.
    build() {
      if (this.u) this.u.destroy();
      const x = Array.from({ length: this.count + 1 }, (_, at) => at), columns = [], series = [];
      let below = new Array(this.count).fill(0);
      for (const line of this.lines.filter((one) => one.on)) {
        below = below.map((bytes, at) => bytes + line.bytes[at]);
        columns.unshift([...below, below[this.count - 1]]);
        const fill = colour(`--${line.colour}`);
        series.unshift({ fill, stroke: fill, width: 0.5, points: { show: false },
          paths: uPlot.paths.stepped({ align: 1 }) });
      }
      this.u = new uPlot(this.options(series), [x, ...columns], this.plot);
      this.read();
    }

    options(series) {
      const axis = axisStyle();
      return {
        width: this.width(), height: this.height, series: [{}, ...series], legend: { show: false },
        padding: [24, 14, 0, 0], cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
        scales: {
          x: { time: false, range: [0, this.count] },
          y: { range: (u, min, max) => [0, Math.max(max, this.top) * 1.05 || 1] },
        },
        axes: [
          { ...axis, size: 26, grid: { show: false }, ticks: { show: false }, values: () => [] },
          { ...axis, size: 76, space: 44, values: byteTicks, incrs: BYTE_STEPS },
        ],
        hooks: { draw: [(u) => this.marks(u)], setCursor: [() => this.read()] },
      };
    }

    // Where the phases are, with their names where there is room near them, and a line at the peak.
    marks(u) {
      const ctx = u.ctx, ratio = devicePixelRatio || 1, { left, top, width, height } = u.bbox;
      const bottom = top + height, ink = colour("--ink");
      ctx.save();
      ctx.font = `${12 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      ctx.strokeStyle = ctx.fillStyle = ink;
      ctx.lineWidth = ratio;
      const upright = (x, from, to) => { ctx.beginPath(); ctx.moveTo(x, from); ctx.lineTo(x, to); ctx.stroke(); };
      let begin = 0, free = left; // columns before the span, and where the last name ends
      ctx.textBaseline = "top";
      for (const [name, count] of this.spans) {
        const from = u.valToPos(begin, "x", true), middle = u.valToPos(begin + count / 2, "x", true);
        ctx.setLineDash([3 * ratio, 3 * ratio]);
        if (begin > 0) upright(from, top, bottom + 6 * ratio);
        ctx.setLineDash([]);
        begin += count;
        const half = ctx.measureText(name).width / 2, x = Math.min(Math.max(middle, free + half), left + width - half);
        if (!name || x - half < free || x - middle > 48 * ratio) continue;
        ctx.fillText(name, x, bottom + 7 * ratio);
        free = x + half + 8 * ratio;
      }
      const peak = u.valToPos(this.highest + 0.5, "x", true), text = `peak ${bytes(this.sums[this.highest])}`;
      const half = ctx.measureText(text).width / 2;
      ctx.strokeStyle = colour("--bg"); // around it, so that it is seen on any colour
      ctx.lineWidth = 3 * ratio;
      upright(peak, top - 6 * ratio, bottom);
      ctx.strokeStyle = ink;
      ctx.lineWidth = ratio;
      upright(peak, top - 6 * ratio, bottom);
      ctx.textBaseline = "bottom";
      ctx.fillText(text, Math.max(left + half, Math.min(left + width - half, peak)), top - 7 * ratio);
      ctx.restore();
    }

    // The figures below: of the column at the cursor, or of the peak.
    read() {
      if (!this.u || !this.u.bbox) return;
      const { left } = this.u.cursor, idle = !(left >= 0);
      const column = idle ? this.highest : Math.min(this.count - 1, Math.max(0, Math.floor(this.u.posToVal(left, "x"))));
      for (const line of this.lines) line.output.textContent = line.on ? bytes(line.bytes[column]) : "–";
      let end = 0;
      const [phase] = this.spans.find(([, count]) => (end += count) > column);
      const when = phase || (this.spans.length > 1 ? "after the optimizer's step" : "the step");
      const total = `${when}, ${bytes(this.sums[column])}`;
      this.at.textContent = idle ? `Below: at the peak, ${total}`
        : `${total} · ${number.format(column + 1)} of ${number.format(this.count)}`;
      this.column = idle ? null : column;
    }

    key(event) {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.key === "Escape") this.u.setCursor({ left: -10, top: -10 });
      else if (move) {
        const from = this.column === null ? this.highest : this.column + move * (event.shiftKey ? 10 : 1);
        const column = Math.max(0, Math.min(this.count - 1, from));
        this.u.setCursor({ left: this.u.valToPos(column + 0.5, "x"), top: 10 });
      } else return;
      event.preventDefault();
    }
  }

  function shortened(ctx, text, room) {
    if (ctx.measureText(text).width <= room) return text;
    let kept = text;
    while (kept.length > 1 && ctx.measureText(kept + "…").width > room) kept = kept.slice(0, -1);
    return kept + "…";
  }

  // --- charts that go together ---------------------------------------------------------------------

  class Group {
    constructor(name) {
      this.name = name;
      this.charts = [];
      this.mode = "time";
      this.following = false;
    }

    full() {
      let min = Infinity, max = -Infinity;
      for (const { u } of this.charts) {
        const x = u.data[0];
        if (x.length) { min = Math.min(min, x[0]); max = Math.max(max, x[x.length - 1]); }
      }
      return max > min ? [min, max] : [min - 0.5, min + 0.5];
    }

    setRange(range) {
      const [low, high] = this.full();
      let [min, max] = range || [low, high];
      const wide = Math.min(high - low, Math.max(max - min, (high - low) / 1e5));
      min = Math.max(low, Math.min(min, high - wide));
      max = min + wide;
      this.follow(null, min, max);
    }

    follow(from, min, max) {
      if (this.following || min === null || max === null) return;
      this.following = true;
      for (const chart of this.charts) {
        if (chart !== from) chart.u.setScale("x", { min, max });
        queueMicrotask(() => chart.read());
      }
      queueMicrotask(() => { this.following = false; });
    }

    view() { return [this.charts[0].u.scales.x.min, this.charts[0].u.scales.x.max]; }

    zoom(factor) {
      const [min, max] = this.view(), middle = (min + max) / 2, half = (max - min) / 2 * factor;
      this.setRange([middle - half, middle + half]);
    }

    pan(by) {
      const [min, max] = this.view(), far = (max - min) * by;
      this.setRange([min + far, max + far]);
    }

    setMode(mode) {
      this.mode = mode;
      for (const chart of this.charts) chart.build();
    }

    show(ms) {
      const chart = this.charts[0], [low, high] = this.full(), x = xAt(chart.record, ms, this.mode);
      const wide = Math.min((high - low) / 8, (this.view()[1] - this.view()[0]));
      this.setRange([x - wide / 2, x + wide / 2]);
      chart.place.scrollIntoView({ block: "center" });
      chart.plot.focus({ preventScroll: true });
      requestAnimationFrame(() => chart.u.setCursor({ left: chart.u.valToPos(x, "x"), top: 10 }));
    }
  }

  // --- the page ------------------------------------------------------------------------------------

  function everyChart(action) {
    for (const group of groups.values()) group.charts.forEach(action);
    stacks.forEach(action);
  }

  function rebuild() {
    for (const group of groups.values()) {
      const range = group.charts.length ? group.view() : null;
      group.charts.forEach((chart) => chart.build());
      if (range) group.setRange(range);
    }
    stacks.forEach((stack) => stack.build());
  }

  for (const place of document.querySelectorAll("[data-chart]")) {
    const description = data.charts.find((chart) => chart.place === place.dataset.chart);
    const name = place.dataset.chart.split("-")[0];
    if (!groups.has(name)) groups.set(name, new Group(name));
    new Chart(place, description);
  }
  for (const place of document.querySelectorAll("[data-stack]")) {
    stacks.push(new Stack(place, data.stacks.find((stack) => stack.place === place.dataset.stack)));
  }
  for (const choice of document.querySelectorAll("[data-shows]")) {
    const at = [...document.querySelectorAll("[data-stack]")].findIndex((place) => place.dataset.stack === choice.dataset.shows);
    const show = () => stacks[at].show(data.stacks.find((stack) => stack.place === choice.value));
    choice.addEventListener("change", show);
    if (choice.value !== choice.dataset.shows) show(); // The browser has kept a choice from before.
  }
  for (const button of document.querySelectorAll(".jump")) {
    button.addEventListener("click", () => {
      const group = groups.get(`r${button.dataset.record}`);
      if (group) group.show(Number(button.dataset.at));
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
  addEventListener("beforeprint", () => {
    root.classList.add("paper");
    everyChart((chart) => { chart.width = () => 660; chart.screenHeight = chart.height; chart.height = Math.min(chart.height, 220); });
    rebuild();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("paper");
    everyChart((chart) => { delete chart.width; chart.height = chart.screenHeight; });
    rebuild();
  });
  requestAnimationFrame(() => { root.dataset.ready = String(Math.round(performance.now())); });
})();
