"use strict";
(() => {
  const data = JSON.parse(document.getElementById("lowtide-document").textContent);
  const byId = (id) => document.getElementById(id);
  const ROLES = { weights: "weights", inputs: "batch", optimizer: "optimizer", gradients: "gradients", packed: "packed", saved: "saved", transient: "transient" };
  const FORMS = ["compressed", "mask", "rebuilt", "recomputed", "offloaded", "kept", "skipped", "shared"];

  // ------------------------------------------------------------ small things

  // Names come from models of anybody: they only ever become text.
  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value != null) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child != null).map((child) => (child instanceof Node ? child : String(child))));
    return node;
  }

  // A name that may go on in a new line after each of its dots.
  function dotted(name) {
    const node = make("span");
    name.split(/(?<=\.)/).forEach((part, i) => node.append(...(i ? [make("wbr"), part] : [part])));
    return node;
  }

  // As lowtide.report.size writes them, with half a tenth rounded to even.
  function tenths(value) {
    const scaled = value * 10;
    let whole = Math.floor(scaled);
    if (scaled - whole > 0.5 || (scaled - whole === 0.5 && whole % 2)) whole += 1;
    return (whole / 10).toFixed(1);
  }
  function size(nbytes) {
    let value = nbytes;
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (value < 1024 || unit === "GiB") return unit === "B" ? `${value} B` : `${tenths(value)} ${unit}`;
      value /= 1024;
    }
  }
  // As Python's :.3g writes them.
  function short(value) {
    if (value == null) return "–";
    if (value === 0) return "0";
    const [digits, exponent] = value.toExponential(2).split("e");
    if (exponent < -4 || exponent >= 3) {
      const sign = exponent < 0 ? "-" : "+";
      return `${String(Number(digits))}e${sign}${String(Math.abs(exponent)).padStart(2, "0")}`;
    }
    return String(Number(value.toPrecision(3)));
  }
  const percent = (part) => `${(100 * part).toFixed(part && part < 0.1 ? 1 : 0)} %`;
  const shape = (row) => row.shape.join("x");
  const where = (row) => row.module || "(model)";
  const opSlot = (row) => `${row.op}.${row.slot}`;
  const nameOf = (row) => `${where(row)}: ${opSlot(row)}${row.ordinal ? `#${row.ordinal}` : ""}`;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function download(name, type, text) {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function heads(table, names, numbers) {
    table.tHead.replaceChildren(make("tr", {}, ...names.map((name, i) => make("th", { scope: "col", class: numbers.has(i) && "number" }, name))));
  }

  // ------------------------------------------------------------ theme

  const redraws = [];
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  function themed() {
    byId("theme").setAttribute("aria-pressed", String(isDark()));
    redraws.forEach((redraw) => redraw());
  }
  byId("theme").addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("lowtide-theme", next);
    } catch {
      // Not kept, then.
    }
    themed();
  });
  system.addEventListener("change", themed);

  // ------------------------------------------------------------ headline and words

  function about() {
    byId("title").textContent = data.title;
    const facts = [];
    if (data.about.limit) facts.push(data.about.limit);
    if (data.about.device) facts.push(`on ${data.about.device}`);
    if (data.about.fake) facts.push("sizes computed without data");
    const count = data.sites.length + data.left_out.sites;
    if (count) facts.push(`${count} places where autograd saves a tensor`);
    byId("about").textContent = facts.join(" · ");
    byId("footer").textContent = `Written by Lowtide ${data.lowtide}. This file needs no network and sends nothing.`;
    byId("json").addEventListener("click", () => download("lowtide.json", "application/json", JSON.stringify(data, null, 1)));
  }

  function card(name, pair, shown, how) {
    const known = pair.after == null ? pair.before : pair.after;
    const both = pair.before != null && pair.after != null;
    const box = make("div", { class: "card" }, make("h2", {}, name), make("p", { class: "big" }, known == null ? "unknown" : shown(known)));
    if (both) {
      const times = pair.before / pair.after;
      const change = times >= 1.005 ? `, ${times.toFixed(times < 10 ? 2 : 1)}x less` : times <= 0.995 ? `, ${(1 / times).toFixed(2)}x more` : ", as before";
      box.append(make("p", { class: "was muted" }, `from ${shown(pair.before)}${change}`));
      const most = Math.max(pair.before, pair.after);
      box.append(make("div", { class: "pair", "aria-hidden": "true" }, make("span", { style: { width: `${(100 * pair.after) / most}%` } })));
    }
    if (how) box.append(make("p", { class: "how" }, how));
    return box;
  }

  function headline() {
    const { peak, kept, step, gradient } = data.headline;
    const found = [];
    if (peak) found.push(card("Peak of a step", peak, size, peak.how));
    if (kept) found.push(card("Kept for backward", kept, size, kept.held ? `${size(kept.held)} more is kept alive by other code` : "each storage once"));
    if (step) found.push(card("Time of a step", step, (s) => `${short(s)} s`, step.how));
    if (gradient) {
      const tone = { safe: "good", noisy: "fair", unsafe: "bad" }[gradient.verdict] || "";
      const box = make("div", { class: "card" }, make("h2", {}, "Error of the gradient"), make("p", { class: "big" }, gradient.error == null ? "not finite" : short(gradient.error)));
      if (gradient.sgd_noise != null) box.append(make("p", { class: "was muted" }, `SGD's own noise: ${short(gradient.sgd_noise)}`));
      if (gradient.verdict) box.append(make("p", { class: `was ${tone}` }, make("strong", {}, gradient.verdict)), make("p", { class: "how" }, gradient.reason));
      box.append(make("p", { class: "how" }, gradient.how));
      found.push(box);
    }
    byId("headline").replaceChildren(...found);
  }

  function words() {
    for (const [id, lines] of [["why", data.why], ["notes", data.notes]]) {
      byId(id).hidden = !lines.length;
      byId(id).querySelector("ul").replaceChildren(...lines.map((line) => make("li", {}, line)));
    }
    const after = data.timeline && data.timeline.after;
    if (!data.timeline) byId("why-title").textContent = "What stays as it is, and why";
    if (after) byId("why-title").textContent = after.peak.nbytes < data.timeline.before.peak.nbytes ? "Why the peak fell as far as it did" : "Why the peak did not fall";
  }

  // ------------------------------------------------------------ memory over time

  const series = data.timeline ? data.timeline.series : [];
  const stages = series.filter((s) => s.role === "saved");
  const tint = (s) => (s.role === "saved" ? `stage${stages.indexOf(s) % 5}` : s.role);
  const label = (s) => (s.role === "saved" && s.stage ? `saved in ${s.stage}` : ROLES[s.role]);

  function axisFont() {
    return "12px system-ui, sans-serif";
  }

  // Ticks at whole numbers of a unit of bytes: 1, 2 or 5 times a power of ten, or a power of two between units.
  function byteTicks(plot, axis, low, high) {
    const unit = 1024 ** Math.min(3, Math.max(0, Math.floor(Math.log(high || 1) / Math.log(1024))));
    const rough = (high - low) / unit / 5;
    const power = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough) * unit;
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
    return found;
  }
  const tick = (v) => size(Math.round(v)).replace(".0 ", " ");

  function stacked(side, most, onMoment) {
    // The top of the stack is drawn first, and each lower one covers its part of it.
    const { moments, forward_end: turn } = data.timeline;
    const { at, nbytes, peak } = side;
    const sums = [];
    nbytes.forEach((row, i) => sums.push(i ? row.map((v, k) => v + sums[i - 1][k]) : row.slice()));
    const order = series.map((_, i) => i).reverse();
    const options = {
      width: 400,
      height: 260,
      padding: [16, 20, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (u, low, high) => [low === at[0] ? 0 : low, high === at[at.length - 1] ? moments - 1 : high] }, y: { range: [0, most * 1.08] } },
      axes: [
        {
          stroke: () => colour("muted"), font: axisFont(), size: 34, grid: { show: false }, ticks: { show: false },
          splits: (u) => [0, turn, moments - 1].filter((v) => v >= u.scales.x.min && v <= u.scales.x.max),
          values: (u, splits) => splits.map((v) => (v === turn ? "backward begins" : v === 0 ? "start" : "end")),
        },
        { stroke: () => colour("muted"), font: axisFont(), size: 68, splits: byteTicks, values: (u, splits) => splits.map(tick), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } },
      ],
      series: [{}, ...order.map((i) => ({ fill: () => colour(tint(series[i])), width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) }))],
      hooks: {
        draw: [
          (u) => {
            const c = u.ctx;
            const ratio = devicePixelRatio;
            c.save();
            c.beginPath();
            c.rect(u.bbox.left, u.bbox.top - 14 * ratio, u.bbox.width, u.bbox.height + 14 * ratio);
            c.clip();
            c.lineWidth = ratio;
            c.strokeStyle = colour("muted");
            c.setLineDash([4 * ratio, 4 * ratio]);
            const middle = u.valToPos(turn, "x", true);
            c.beginPath();
            c.moveTo(middle, u.bbox.top);
            c.lineTo(middle, u.bbox.top + u.bbox.height);
            c.stroke();
            c.setLineDash([]);
            const x = u.valToPos(peak.at, "x", true);
            const y = u.valToPos(peak.nbytes, "y", true);
            c.fillStyle = c.strokeStyle = colour("text");
            c.beginPath();
            c.moveTo(x, y);
            c.lineTo(x, u.bbox.top + u.bbox.height);
            c.stroke();
            c.beginPath();
            c.arc(x, y, 4 * ratio, 0, 7);
            c.fill();
            c.font = `600 ${12 * ratio}px system-ui, sans-serif`;
            const words = `peak ${size(peak.nbytes)}`;
            const right = x + c.measureText(words).width + 8 * ratio > u.bbox.left + u.bbox.width;
            c.textAlign = right ? "right" : "left";
            c.fillText(words, x + (right ? -8 : 8) * ratio, y - 4 * ratio);
            c.restore();
          },
        ],
        setCursor: [(u) => onMoment(u.cursor.idx == null || u.cursor.left < 0 ? null : at[u.cursor.idx])],
      },
    };
    return { options, values: [at, ...order.map((i) => sums[i])] };
  }

  function mount(holder, options, values) {
    const plot = new uPlot({ ...options, width: Math.max(200, holder.clientWidth) }, values, holder);
    new ResizeObserver(() => {
      const width = Math.max(200, holder.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height: options.height });
    }).observe(holder);
    redraws.push(() => plot.redraw(false, true));
    holder.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      const last = values[0].length - 1;
      let at = plot.cursor.idx == null ? 0 : plot.cursor.idx;
      if (steps) at += steps;
      else if (event.key === "Home") at = 0;
      else if (event.key === "End") at = last;
      else return;
      event.preventDefault();
      at = Math.min(last, Math.max(0, at));
      plot.setCursor({ left: plot.valToPos(values[0][at], "x"), top: 10 });
    });
    return plot;
  }

  function timeline() {
    if (!data.timeline) return;
    const section = byId("timeline");
    section.hidden = false;
    const sides = ["before", "after"].filter((name) => data.timeline[name]);
    const most = Math.max(...sides.map((name) => data.timeline[name].peak.nbytes));
    const panels = section.querySelector(".panels");
    panels.classList.toggle("one", sides.length === 1);
    const table = section.querySelector(".roles");
    const names = { before: sides.length > 1 ? "Before" : "This step", after: "After" };
    const used = series.map((s, i) => i).filter((i) => sides.some((name) => data.timeline[name].nbytes[i].some(Boolean)));
    const valueAt = (side, moment, i) => {
      let k = 0;
      while (k + 1 < side.at.length && side.at[k + 1] <= moment) k += 1;
      return side.nbytes[i][k];
    };
    function show(moment) {
      const rows = [...used].reverse().map((i) =>
        make("tr", {}, make("th", { scope: "row" }, make("span", { class: "swatch", "aria-hidden": "true", style: { background: `var(--${tint(series[i])})` } }), ` ${label(series[i])}`),
          ...sides.map((name) => make("td", { class: "number" }, size(valueAt(data.timeline[name], moment == null ? data.timeline[name].peak.at : moment, i))))));
      const total = (name) => (moment == null ? data.timeline[name].peak.nbytes : used.reduce((sum, i) => sum + valueAt(data.timeline[name], moment, i), 0));
      rows.push(make("tr", {}, make("th", { scope: "row" }, make("strong", {}, "all")), ...sides.map((name) => make("td", { class: "number" }, make("strong", {}, size(total(name)))))));
      table.tBodies[0].replaceChildren(...rows);
      const pass = moment != null && (moment <= data.timeline.forward_end ? "forward" : "backward");
      table.caption.textContent = moment == null ? "At the peak" : `At moment ${moment} of ${data.timeline.moments - 1}, in the ${pass} pass`;
    }
    heads(table, ["", ...sides.map((name) => names[name])], new Set([1, 2]));
    show(null);
    for (const name of sides) {
      const { peak } = data.timeline[name];
      const text = `${names[name]}: peak ${size(peak.nbytes)} at moment ${peak.at}, in the ${peak.phase} pass`;
      const holder = make("div", { class: "plot", tabindex: "0", role: "img", "aria-label": `Memory over the step, stacked by role. ${text}. The table below has the numbers of the moment.` });
      panels.append(make("figure", { class: "panel" }, make("figcaption", {}, `${names[name]} `, make("span", {}, `peak ${size(peak.nbytes)} in the ${peak.phase} pass`)), holder));
    }
    sides.forEach((name, i) => {
      const { options, values } = stacked(data.timeline[name], most, show);
      mount(panels.querySelectorAll(".plot")[i], options, values);
    });
    const holders = section.querySelector(".holders");
    for (const name of sides) {
      const { peak } = data.timeline[name];
      const rows = peak.holders.map((h) => make("tr", {}, make("td", {}, make("span", { class: "swatch", "aria-hidden": "true", style: { background: `var(--${h.role === "saved" ? "stage1" : h.role})` } }), ` ${ROLES[h.role]}${h.label ? ` · ${h.label}` : ""}`), make("td", { class: "number" }, size(h.nbytes))));
      if (peak.others.count) rows.push(make("tr", {}, make("td", { class: "muted" }, `${peak.others.count} others`), make("td", { class: "number muted" }, size(peak.others.nbytes))));
      const title = sides.length > 1 ? `Held at the peak ${name}` : "Held at the peak";
      holders.append(make("div", {}, make("h3", {}, title), make("table", {}, make("tbody", {}, ...rows))));
    }
  }

  // ------------------------------------------------------------ tensors

  function tensors() {
    if (!data.sites.length) return;
    byId("tensors").hidden = false;
    const chosen = new Set();
    const present = FORMS.filter((form) => data.sites.some((row) => row.form === form));
    let bars = 14;
    let lines = 100;
    let order = { key: "plain_nbytes", up: false };
    const text = new Map(data.sites.map((row) => [row, [nameOf(row), shape(row), row.dtype, row.form, row.codec, row.why].join("\n").toLowerCase()]));
    const depth = moduleDepth();

    function moduleDepth() {
      for (let d = 1; d < 6; d += 1) if (new Set(data.sites.map((row) => row.module.split(".").slice(0, d).join("."))).size >= 6) return d;
      return 6;
    }
    const groupName = {
      op: opSlot,
      module: (row) => row.module.split(".").slice(0, depth).join(".") || "(model)",
      tensor: nameOf,
    };

    function matching() {
      const wanted = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
      return data.sites.filter((row) => (!chosen.size || chosen.has(row.form)) && wanted.every((word) => text.get(row).includes(word)));
    }

    function track(kind, parts, most, field) {
      return make("div", { class: `track ${kind}` }, ...present.filter((form) => parts[form] && parts[form][field]).map((form) =>
        make("span", { style: { width: `${Math.max(0.15, (100 * parts[form][field]) / most)}%`, background: `var(--${form})` } })));
    }

    function drawBars(rows) {
      const groups = new Map();
      for (const row of rows) {
        const key = groupName[byId("group").value](row);
        if (!groups.has(key)) groups.set(key, { key, plain: 0, stored: 0, count: 0, parts: {} });
        const group = groups.get(key);
        group.plain += row.plain_nbytes;
        group.stored += row.stored_nbytes;
        group.count += 1;
        const part = (group.parts[row.form] = group.parts[row.form] || { plain: 0, stored: 0 });
        part.plain += row.plain_nbytes;
        part.stored += row.stored_nbytes;
      }
      const sorted = [...groups.values()].filter((g) => g.plain || g.stored).sort((a, b) => b.plain - a.plain);
      const most = sorted.length ? Math.max(...sorted.map((g) => Math.max(g.plain, g.stored))) : 1;
      byId("bars").replaceChildren(...sorted.slice(0, bars).map((group) => {
        const forms = present.filter((form) => group.parts[form]).map((form) => `${form}: ${size(group.parts[form].plain)} → ${size(group.parts[form].stored)}`);
        return make("li", { title: `${group.key}\n${group.count} saved\n${forms.join("\n")}` },
          make("span", { class: "name" }, dotted(group.key), byId("group").value === "tensor" ? null : make("span", { class: "muted" }, ` · ${group.count}`)),
          make("span", { class: "tracks", "aria-hidden": "true" }, track("plain", group.parts, most, "plain"), track("stored", group.parts, most, "stored")),
          make("span", { class: "figures" }, `${size(group.plain)} → `, make("b", {}, size(group.stored))));
      }));
      const hidden = sorted.length - bars;
      byId("more-bars").hidden = hidden <= 0;
      byId("more-bars").textContent = `Show ${hidden} more bars`;
    }

    const columns = [
      ["module", "module", where], ["saved by", "op", (r) => `${opSlot(r)}${r.ordinal ? `#${r.ordinal}` : ""}`], ["shape", "shape", (r) => `${shape(r)} ${r.dtype}`],
      ["before", "plain_nbytes", (r) => (r.form === "shared" ? "–" : size(r.plain_nbytes))], ["after", "stored_nbytes", (r) => (r.form === "shared" ? "–" : size(r.stored_nbytes))],
      ["became", "form", (r) => r.form], ["stored as", "codec", (r) => r.codec], ["why", "why", (r) => r.why],
    ];
    function sorted(rows) {
      const value = (row) => (order.key === "op" ? `${opSlot(row)}#${row.ordinal}` : order.key === "shape" ? row.shape.reduce((a, b) => a * b, 1) : row[order.key]);
      const sign = order.up ? 1 : -1;
      return [...rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return sign * (typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true }));
      });
    }
    function drawTable(rows) {
      const table = byId("sites");
      table.tHead.replaceChildren(make("tr", {}, ...columns.map(([name, key]) => {
        const button = make("button", { type: "button" }, name);
        button.addEventListener("click", () => {
          order = { key, up: order.key === key ? !order.up : !key.endsWith("nbytes") && key !== "shape" };
          drawTable(matching());
          byId("sites").tHead.querySelectorAll("button")[columns.findIndex((c) => c[1] === key)].focus();
        });
        return make("th", { scope: "col", class: key.endsWith("nbytes") && "number", "aria-sort": order.key === key ? (order.up ? "ascending" : "descending") : "none" }, button);
      })));
      const shown = sorted(rows).slice(0, lines);
      table.tBodies[0].replaceChildren(...shown.map((row) => make("tr", {}, ...columns.map(([, key, cell]) => {
        if (key === "form") return make("td", { class: "form" }, make("span", { class: "swatch", "aria-hidden": "true", style: { background: `var(--${row.form})` } }), ` ${row.form}`);
        return make("td", { class: key.endsWith("nbytes") ? "number" : key }, key === "module" || key === "op" ? dotted(cell(row)) : cell(row));
      }))));
      byId("more-rows").hidden = rows.length <= lines;
      byId("more-rows").textContent = `Show ${rows.length - lines} more rows`;
    }

    function draw() {
      const rows = matching();
      const sum = (field) => rows.reduce((total, row) => total + row[field], 0);
      const left = data.left_out.sites ? ` ${data.left_out.sites} smaller ones, ${size(data.left_out.plain_nbytes)} in all, are not in this document.` : "";
      byId("found").textContent = `${rows.length} of ${data.sites.length} shown: ${size(sum("plain_nbytes"))} before, ${size(sum("stored_nbytes"))} after.${left} The pale bar is what plain autograd keeps, the full one what is stored instead.`;
      byId("csv").textContent = rows.length === data.sites.length ? "Download CSV" : `Download CSV of ${rows.length} rows`;
      drawBars(rows);
      drawTable(rows);
    }

    byId("forms").replaceChildren(...present.map((form) => {
      const button = make("button", { type: "button", "aria-pressed": "false" }, make("span", { class: "swatch", "aria-hidden": "true", style: { background: `var(--${form})` } }), form);
      button.addEventListener("click", () => {
        if (!chosen.delete(form)) chosen.add(form);
        button.setAttribute("aria-pressed", String(chosen.has(form)));
        draw();
      });
      return button;
    }));
    byId("search").addEventListener("input", draw);
    byId("group").addEventListener("change", draw);
    byId("more-bars").addEventListener("click", () => { bars = Infinity; draw(); });
    byId("more-rows").addEventListener("click", () => { lines = Infinity; draw(); });
    byId("csv").addEventListener("click", () => {
      const fields = ["module", "op", "slot", "ordinal", "shape", "dtype", "form", "plain_nbytes", "stored_nbytes", "codec", "why"];
      // A spreadsheet would run a cell that begins like a formula.
      const cell = (value) => `"${String(value).replace(/^[=+\-@\t\r]/, "'$&").replace(/"/g, '""')}"`;
      const rows = sorted(matching()).map((row) => fields.map((f) => (typeof row[f] === "number" ? row[f] : cell(f === "shape" ? shape(row) : row[f]))).join(","));
      download("lowtide-tensors.csv", "text/csv", [fields.join(","), ...rows].join("\r\n") + "\r\n");
    });
    draw();
  }

  // ------------------------------------------------------------ other plans

  function frontier() {
    const found = data.frontier;
    if (!found || found.points.length < 2) return;
    const section = byId("frontier");
    const isError = found.measure === "error";
    section.querySelector("p").textContent = isError
      ? "Each point is a plan: the peak of the step with it, and the relative error of the gradient that is predicted."
      : "Each point is a plan: the peak of the step with it, and its cost by a formula for values that are spread normally. The profile has no data, so errors are not known; costs only tell which plan is gentler.";
    const measure = (p) => p[found.measure];
    const points = found.points.filter((p) => measure(p) != null).sort((a, b) => a.peak - b.peak);
    const x = [...new Set([...points.map((p) => p.peak), ...(found.chosen ? [found.chosen.peak] : [])])].sort((a, b) => a - b);
    // On a scale of powers nothing has no place; the table has it.
    const positive = (p) => (p && measure(p) > 0 ? measure(p) : null);
    const line = x.map((peak) => positive(points.find((q) => q.peak === peak)));
    const mark = x.map((peak) => (found.chosen && peak === found.chosen.peak ? positive(found.chosen) : null));
    const [low, high] = [x[0], x[x.length - 1]];
    const room = (high - low || high) * 0.05;
    const levels = [...line, ...mark].filter((v) => v != null);
    if (!levels.length) return;
    const [least, most] = [Math.min(...levels), Math.max(...levels)];
    section.hidden = false;
    const name = isError ? "error of the gradient" : "cost";
    const holder = section.querySelector(".chart");
    holder.classList.add("plot");
    holder.tabIndex = 0;
    holder.setAttribute("role", "img");
    holder.setAttribute("aria-label", `Peaks from ${size(low)} to ${size(high)}, with ${name} from ${short(measure(points[0]))} down to ${short(measure(points[points.length - 1]))}. The table below has all points.`);
    const powers = (u, axis, from, to) => {
      const [first, last] = [Math.ceil(Math.log10(from)), Math.floor(Math.log10(to))];
      const step = Math.max(1, Math.ceil((last - first) / 5));
      const found = [];
      for (let power = last; power >= first; power -= step) found.unshift(10 ** power);
      return found.length ? found : [from, to];
    };
    mount(holder, {
      height: 240,
      padding: [12, 30, 0, 0],
      legend: { show: false },
      cursor: { points: { size: 8 }, drag: { x: false, y: false } },
      scales: { x: { time: false, range: [low - room, high + room] }, y: { distr: 3, range: [least / 1.5, most * 1.5] } },
      axes: [
        { stroke: () => colour("muted"), font: axisFont(), splits: byteTicks, values: (u, s) => s.map(tick), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, label: "peak of the step", labelFont: axisFont(), labelSize: 20, size: 30, space: 90 },
        { stroke: () => colour("muted"), font: axisFont(), size: 56, splits: powers, filter: (u, splits) => splits, values: (u, s) => s.map(short), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, label: name, labelFont: axisFont(), labelSize: 20 },
      ],
      series: [
        {},
        { stroke: () => colour("accent"), width: 1.5, spanGaps: true, points: { show: true, size: 6, fill: () => colour("accent") } },
        { stroke: () => colour("text"), width: 0, paths: () => null, points: { show: true, size: 13, width: 2.5, stroke: () => colour("text"), fill: () => colour("gradients") } },
      ],
    }, [x, line, mark]);
    if (found.chosen && measure(found.chosen) != null) section.querySelector("figure").append(make("figcaption", { class: "muted" }, `${measure(found.chosen) > 0 ? "The ringed point is this" : "This"} plan: peak ${size(found.chosen.peak)}, ${name} ${short(measure(found.chosen))}. A plain step peaks at ${size(found.plain)}.`));
    const table = section.querySelector("table");
    const timed = found.points.some((p) => p.seconds != null);
    heads(table, ["peak", "kept for backward", name, ...(timed ? ["seconds added"] : [])], new Set([0, 1, 2, 3]));
    table.tBodies[0].replaceChildren(...found.points.map((p) => make("tr", {}, ...[size(p.peak), size(p.kept), short(measure(p)), ...(timed ? [short(p.seconds)] : [])].map((v) => make("td", { class: "number" }, v)))));
  }

  // ------------------------------------------------------------ gradients

  function fidelity() {
    const found = data.fidelity;
    if (!found) return;
    const section = byId("fidelity");
    section.hidden = false;
    const tone = { safe: "good", noisy: "fair", unsafe: "bad" }[found.verdict] || "";
    section.querySelector(".verdict").append(make("strong", { class: tone }, found.verdict), `: ${found.reason}.`);
    const noise = found.parameters.some((p) => p.ratio != null);
    section.querySelector(".muted").textContent = noise
      ? "The bar is the error that compression adds, beside SGD's own noise in the same parameter. The line marks as much as SGD; a quarter of it adds a sixteenth to the variance. Worst first; parameters with hardly any gradient come last."
      : "The relative error of each parameter's gradient, worst first. SGD's own noise is not known here.";
    let lines = 12;
    const worst = Math.max(...found.parameters.map((p) => p.error || 0)) || 1;
    const table = section.querySelector("table");
    heads(table, ["parameter", noise ? "error beside SGD's noise" : "error beside the worst", "error", "SGD's noise", "bias", "cosine"], new Set([2, 3, 4, 5]));
    function draw() {
      table.tBodies[0].replaceChildren(...found.parameters.slice(0, lines).map((p) => {
        const full = Math.max(1.25, ...found.parameters.filter((q) => q.counts).map((q) => Math.min(4, q.ratio || 0)));
        const bar = make("div", { class: "meter", "aria-hidden": "true" });
        if (!noise) bar.append(make("span", { style: { width: `${(100 * (p.error || 0)) / worst}%` } }));
        else if (p.ratio != null) bar.append(make("span", { style: { width: `${Math.min(100, (100 * p.ratio) / full)}%`, background: p.ratio > 1 ? "var(--bad)" : null } }), make("i", { style: { left: `${100 / full}%` } }));
        return make("tr", {}, make("th", { scope: "row", class: !p.counts && "muted" }, dotted(p.parameter)),
          make("td", {}, make("div", { class: "measure" }, bar, noise && p.ratio != null ? make("span", { class: "muted" }, `${short(p.ratio)}x`) : null)),
          ...[p.error, p.sgd_noise, p.bias, p.cosine].map((v) => make("td", { class: "number" }, short(v))));
      }));
      byId("more-parameters").hidden = found.parameters.length <= lines;
      byId("more-parameters").textContent = `Show ${found.parameters.length - lines} more parameters`;
    }
    byId("more-parameters").addEventListener("click", () => { lines = Infinity; draw(); });
    draw();
    if (found.sites.length) {
      const rows = found.sites.slice(0, 8).map((s) => make("tr", {}, make("td", {}, s.sites.join(", ")), make("td", {}, s.codec), make("td", { class: "number" }, s.fall == null ? "–" : percent(s.fall))));
      const inner = make("table", {}, make("thead"), make("tbody", {}, ...rows));
      heads(inner, ["tensor", "stored as", "squared error falls by"], new Set([2]));
      section.querySelector(".spoilers").append(make("h3", {}, `Kept exact, one at a time (${found.sites.length} of ${found.stored} tried)`), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Tensors that matter" }, inner));
    }
  }

  function tables() {
    byId("tables").hidden = !data.tables.length;
    for (const each of data.tables) {
      const table = make("table", {}, make("thead"), make("tbody", {}, ...each.rows.map((row) => make("tr", {}, ...row.map((cell, i) => make(i ? "td" : "th", i ? { class: "number" } : { scope: "row" }, cell))))));
      heads(table, each.head, new Set(each.head.map((_, i) => i).slice(1)));
      byId("tables").append(make("h2", {}, each.title), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": each.title }, table), make("p", { class: "muted" }, each.note));
    }
  }

  about();
  headline();
  words();
  timeline();
  tensors();
  frontier();
  fidelity();
  tables();
  themed();
  document.documentElement.dataset.ready = "";
})();
